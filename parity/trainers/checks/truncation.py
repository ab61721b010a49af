"""Sequences longer than `max_length`: which tokens are kept, and the loss and gradients of these."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from parity.case.inputs import Setting
from parity.trainers.check import EVERY_PATH, CheckCall, CheckCase, Quantity, always, check
from parity.trainers.checks.twins import judged, twin
from parity.trainers.definitions.formulas import Loss
from parity.trainers.rig import batches, drive
from parity.trainers.rig.batches import Sequences
from parity.trainers.rig.stored_window import Window
from parity.trainers.rig.twin_runs import Run
from parity.trainers.specs import having
from parity.upstream import trl

MAX_LENGTH = 10
"""At it four of the window's eight sequences are too long, every prompt keeps a token of its completion at either end."""
SETTINGS = {
    "mode": Setting("keep_start", "truncation_mode; KTO and later releases keep the start", ("keep_start", "keep_end")),
    "split": Setting("8x1", "batch x accumulation", ("8x1", "1x8")),
}
TRAINERS = having("max_length")


def cases(seed: int) -> Iterator[CheckCase]:
    """Every trainer with every setting."""
    for trainer in TRAINERS:
        for mode in ("keep_start", *(["keep_end"] if trainer in having("truncation_mode") else [])):
            for split in ("8x1", "1x8"):
                yield trainer, {"mode": mode, "split": split}


@check(
    "truncation",
    TRAINERS,
    SETTINGS,
    cases,
    pr=[("dpo-trainer", {})],
    covered=always,
    paths=EVERY_PATH,
)
def truncation(call: CheckCall) -> Iterator[Quantity]:
    """The sequences that reach the loss are cut where the config says, and loss and gradients are theirs."""
    s, known = call.settings, trl.fields(drive.config(call.trainer))
    limits: dict[str, Any] = {"max_length": MAX_LENGTH}
    if "truncation_mode" in known or s.mode != "keep_start":
        drive.needs(call.trainer, "truncation_mode")
        limits["truncation_mode"] = s.mode
    run = Run(call.case.family, twin(call.case.family, split=s.split), call.path, plain=True, **limits)
    whole = sorted(run.window.expected)
    run.window = Cut(run.trainer, run.window.rows, s.mode)
    late = sorted(batches.sequences_of(run.steps.batches)) == whole  # DPO up to 1.3 cuts behind where a batch is seen
    yield from judged(call, run, Loss(run.window, run.s), there=not late)


@dataclasses.dataclass(frozen=True)
class Cut(Window):
    """A window whose sequences are cut."""

    mode: str = "keep_start"

    def _of(self, name: str) -> Sequences:
        return cut(super()._of(name), self.mode)


def cut(window: Sequences, mode: str) -> Sequences:
    """At most `MAX_LENGTH` tokens of each sequence, the first or the last; prompts give way at the end that is cut."""
    out = []
    for tokens, start in window:
        gone = max(0, len(tokens) - MAX_LENGTH)
        out.append((tokens[gone:], max(0, start - gone)) if mode == "keep_end" else (tokens[:MAX_LENGTH], start))
    return out
