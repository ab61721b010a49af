"""A sampler whose log-probs differ from the trainer's: GRPO's importance ratio, and the loss with it."""

import functools
import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from parity.case.case import normal
from parity.case.inputs import Setting
from parity.errors import Unsupported
from parity.trainers.check import EVERY_PATH, CheckCall, CheckCase, Quantity, always, check
from parity.trainers.checks.twins import judged, twin
from parity.trainers.definitions.formulas import Loss, padded
from parity.trainers.definitions.scored import Scored
from parity.trainers.rig import drive, stored_window, twin_runs
from parity.trainers.rig.batches import Sequences
from parity.trainers.rig.twin_runs import Run
from parity.upstream import trl

MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
SETTINGS = {
    "mode": Setting("sequence_mask", "vllm_importance_sampling_mode", MODES),
    "low": Setting(None, "vllm_importance_sampling_clip_min", (None, 0.5)),
    "high": Setting(2.0, "vllm_importance_sampling_clip_max, in older releases _cap", (2.0, 30.0)),
    "correction": Setting(True, "vllm_importance_sampling_correction", (True, False)),
    "loss": Setting("dapo", "loss type", ("dapo", "grpo", "dr_grpo")),
    "beta": Setting(0.0, "weight of the KL", (0.0, 0.04)),
    "split": Setting("8x1", "batch x accumulation", ("8x1", "2x4")),
    "tools": Setting(False, "some completion tokens are a tool's: the sampler reports 0 for them", (False, True)),
    "missing": Setting(False, "the sampler has no log-prob for one token of each completion", (False, True)),
}
APART = 0.6
"""Spread of a token's log-prob at the sampler around the trainer's, nats: no ratio is near a bound."""
FIELDS = {"mode": "vllm_importance_sampling_mode", "low": "vllm_importance_sampling_clip_min"}

PR: tuple[CheckCase, ...] = (
    ("grpo-trainer", {"mode": "token_truncate"}),
    ("grpo-trainer", {"tools": True, "split": "2x4"}),
    ("grpo-trainer", {"tools": True}),
)


def cases(seed: int) -> Iterator[CheckCase]:
    """Every mode with every bound, and each other setting with a mode of tokens and of sequences."""
    for mode in MODES:
        for low in (None, 0.5):
            for high in (2.0, 30.0):
                yield "grpo-trainer", {"mode": mode, "low": low, "high": high}
    for mode in ("token_truncate", "sequence_mask"):
        for name in ("correction", "loss", "beta", "split", "tools", "missing"):
            for value in SETTINGS[name].choices or ():
                yield "grpo-trainer", {"mode": mode, name: value}


@check("sampler", ("grpo-trainer",), SETTINGS, cases, pr=PR, covered=always, paths=EVERY_PATH)
def sampler(call: CheckCall) -> Iterator[Quantity]:
    """Loss and every gradient by exp(log π - log π_sampler), truncated or masked as the mode says."""
    s, trainer = call.settings, call.case.family
    settings = twin(trainer, loss=s.loss, beta=s.beta, split=s.split, tools=s.tools)
    run = Run(trainer, settings, call.path, **_options(call))
    given = log_probs(run.window.sequences, s.missing, s.tools)
    _report(run.built, run.window.sequences, given)
    run.built.use_vllm = True
    weigh = functools.partial(ratio, s, padded(given)) if s.correction else None
    yield from judged(call, run, Loss(run.window, run.s, ratio=weigh))


def _options(call: CheckCall) -> dict[str, Any]:
    """The config's fields of the correction.

    Raises:
        Unsupported: where the installed version has none, or lacks a setting that is not at its default.
    """
    s, known = call.settings, trl.fields(drive.config(call.trainer))
    if "vllm_importance_sampling_correction" not in known:
        raise Unsupported("the installed version does not correct for the sampler's log-probs")
    if s.mode not in ("token_truncate",) and FIELDS["mode"] not in known:
        raise Unsupported(f"the installed version has no {FIELDS['mode']}: it truncates the ratios of tokens")
    if s.low is not None and FIELDS["low"] not in known:
        raise Unsupported(f"the installed version has no {FIELDS['low']}")
    newer = "vllm_importance_sampling_clip_max" in known
    wanted = {
        "vllm_importance_sampling_correction": s.correction,
        FIELDS["mode"]: s.mode,
        FIELDS["low"]: s.low,
        f"vllm_importance_sampling_{'clip_max' if newer else 'cap'}": s.high,
    }
    return {k: v for k, v in wanted.items() if k in known}


def log_probs(window: Sequences, missing: bool, tools: bool) -> list[Tensor]:
    """What the sampler reports of each completion, (T_i,) float32: NaN where it has none, 0 for a tool's token."""
    out = []
    with torch.no_grad():
        scored = Scored(stored_window.policy("llama", torch.float64), window)
        pairs = list(zip(scored.tokens, scored.completions, strict=True))
    for i, (logps, tokens) in enumerate(pairs):
        reported = (logps + APART * normal(21, f"sampler {i}", logps.shape).double()).float()
        if tools:
            reported = reported * stored_window.external(tokens).float()
        if missing:
            reported[len(reported) // 2] = math.nan
        out.append(reported)
    return out


def _report(trainer: Any, window: Sequences, given: list[Tensor]) -> None:
    """The sampler's log-probs beside the stored completions, in the lists in which a server's arrive."""
    names = twin_runs.handed_names(trainer._generate_single_turn.original)
    if "logprobs" not in names:
        raise Unsupported(f"_generate_single_turn of the installed version returns {', '.join(names)}: no logprobs")
    known = {(tuple(t[:n]), tuple(t[n:])): lp for (t, n), lp in zip(window, given, strict=True)}

    def reporting(args: tuple[Any, ...], out: Any) -> Any:
        found = dict(zip(names, out, strict=True))
        ids = [stored_window.ids(p) if isinstance(p, str) else list(p) for p in args[0]]
        reported = [known[tuple(p), tuple(c)].tolist() for p, c in zip(ids, found["completion_ids"], strict=True)]
        found["logprobs"] = [[None if math.isnan(x) else x for x in lp] for lp in reported]
        return tuple(found.values())

    drive.changed(trainer, "_generate_single_turn", reporting)


def ratio(s: SimpleNamespace, reported: Tensor, logps: Tensor, mask: Tensor) -> Tensor:
    """exp(log π - log π_sampler) of tokens (N, T) or of sequences (N, 1); 1 for a token whose log-prob is missing."""
    counted = mask > 0.5  # a replica rounds the 0 of a mask to the smallest numbers
    apart = torch.where(counted & ~reported.isnan(), logps - reported.double().nan_to_num(0.0), 0.0)
    if s.mode.startswith("sequence"):
        apart = apart.sum(-1, keepdim=True)
    found = apart.exp()
    low = -math.inf if s.low is None else s.low
    if s.mode.endswith("truncate"):
        return found.clamp(low, s.high)
    return torch.where((found < low) | (found > s.high), 0.0, found)
