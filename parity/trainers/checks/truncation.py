"""Sequences longer than `max_length`: which tokens are kept, and the loss and gradients of these."""

import functools
from collections.abc import Iterator
from typing import Any

import torch

from parity.case.inputs import Setting
from parity.trainers.check import CheckCall, CheckCase, Quantity, by_profile, check, holds, shared
from parity.trainers.checks.twins import plain_twin
from parity.trainers.definitions import preference, windows
from parity.trainers.definitions.gradients import first_step
from parity.trainers.definitions.training_step import exact_step
from parity.trainers.rig import batches, drive, stored_window, twin_runs
from parity.trainers.rig.stored_window import Sequences
from parity.upstream import trl

MAX_LENGTH = 10
"""At it four of the window's eight sequences are too long, every prompt keeps a token of its completion at either end."""
SETTINGS = {
    "mode": Setting("keep_start", "truncation_mode; KTO and later releases keep the start", ("keep_start", "keep_end")),
    "split": Setting("8x1", "batch x accumulation", ("8x1", "1x8")),
    "model": Setting("llama", "tiny model", ("llama", "gemma2")),
}
TRAINERS = ("sft-trainer", "dpo-trainer", "kto-trainer")


@by_profile(pr=[("dpo-trainer", {})], covered=lambda case: True)
def cases(seed: int) -> Iterator[CheckCase]:
    """Every trainer with every setting."""
    for trainer in TRAINERS:
        for mode in ("keep_start", "keep_end") if trainer != "kto-trainer" else ("keep_start",):
            for split in ("8x1", "1x8"):
                yield trainer, {"mode": mode, "split": split}
        yield trainer, {"model": "gemma2"}


@check("truncation", TRAINERS, SETTINGS, cases, paths=("released", "fused", "fixed"))
def truncation(call: CheckCall) -> Iterator[Quantity]:
    """The sequences that reach the loss are cut where the config says, and loss and gradients are theirs."""
    trainer, s = call.case.family, call.settings
    known = trl.fields(drive.config(call.trainer))
    limits: dict[str, Any] = {"max_length": MAX_LENGTH, "truncation_mode": s.mode}
    if "truncation_mode" not in known:
        if s.mode != "keep_start":
            drive.needs(call.trainer, "truncation_mode")
        del limits["truncation_mode"]
    twin = plain_twin(model=s.model, split=s.split)
    steps = twin_runs.train(twin_runs.build(trainer, twin, twin_runs.unfixed(call.path), **limits), call.path)
    rows = twin_runs.rows(trainer)
    window = cut(stored_window.sequences(rows), s.mode)
    other = cut(stored_window.sequences(rows, "other"), s.mode)
    wanted = sorted([*window, *other] if call.spec.paired else window)
    got = sorted(batches.sequences_of(steps.batches))
    lost, more = [w for w in wanted if w not in got], [g for g in got if g not in wanted]
    uncut = got == sorted(twin_runs.expected(trainer))  # DPO up to 1.3 cuts behind the point where a batch is looked at
    yield holds("sequences", wanted == got or uncut, f"missing {lost[:1]}, got {more[:1]}", "exact")
    beta, labels = twin_runs.beta(trainer, twin), twin_runs.labels(rows)
    define = {
        "sft-trainer": functools.partial(windows.sft, window),
        "dpo-trainer": functools.partial(windows.dpo, (window, other), s.model, beta),
        "kto-trainer": functools.partial(preference.apo_zero_unpaired, window, labels, s.model, beta),
    }[trainer]
    step = shared(call, "step", lambda: exact_step(stored_window.policy(s.model, torch.float64), define))
    yield from first_step(step, steps)


def cut(window: Sequences, mode: str) -> Sequences:
    """At most `MAX_LENGTH` tokens of each sequence, the first or the last; prompts give way at the end that is cut."""
    out = []
    for tokens, start in window:
        gone = max(0, len(tokens) - MAX_LENGTH)
        out.append((tokens[gone:], max(0, start - gone)) if mode == "keep_end" else (tokens[:MAX_LENGTH], start))
    return out
