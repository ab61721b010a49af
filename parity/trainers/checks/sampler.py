"""Importance ratios to the log-probs that a sampler reports: one batch of a twin, truncated or masked as asked for.

GMPO has the ratios of GRPO, whose config it inherits. Its term is one of a sequence, and so are the ratios it is held to.
"""

import functools
import itertools
import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from parity.case.inputs import Setting
from parity.errors import Unsupported
from parity.trainers.check import EVERY_PATH, CheckCall, CheckCase, Quantity, always, check
from parity.trainers.checks.twins import judged, twin
from parity.trainers.definitions.formulas import Loss, padded
from parity.trainers.definitions.scored import Scored
from parity.trainers.definitions.training_step import logged, measured
from parity.trainers.rig import drive, recorder, stored_window
from parity.trainers.rig.drawn import normal
from parity.trainers.rig.recorder import Sequences
from parity.trainers.rig.stored_window import Window
from parity.trainers.rig.twin_runs import Run
from parity.upstream import trl

MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
SAMPLER = {
    "mode": Setting("sequence_mask", "vllm_importance_sampling_mode", MODES),
    "low": Setting(None, "vllm_importance_sampling_clip_min", (None, 0.5)),
    "high": Setting(2.0, "vllm_importance_sampling_clip_max, in older releases _cap", (2.0, 30.0)),
    "correction": Setting(True, "vllm_importance_sampling_correction", (True, False)),
    "loss": Setting("dapo", "loss type", ("dapo", "grpo", "dr_grpo")),
    "beta": Setting(0.0, "weight of the KL", (0.0, 0.04)),
    "split": Setting("8x1", "batch x accumulation", ("8x1", "2x4")),
    "tools": Setting(False, "some completion tokens are a tool's: the sampler reports 0 for them", (False, True)),
    "threshold": Setting(None, "off_policy_mask_threshold, of the sampler's log-probs", (None, 0.1, 0.5)),
    "missing": Setting(False, "the sampler has no log-prob for one token of each completion", (False, True)),
}
APART = 0.6
"""Spread of a token's log-prob at the sampler around the trainer's, nats: no ratio is near a bound."""
FIELDS = {
    "mode": "vllm_importance_sampling_mode",
    "low": "vllm_importance_sampling_clip_min",
    "threshold": "off_policy_mask_threshold",
}
SAMPLED: list[dict[str, Any]] = [
    {"mode": "token_truncate"},
    {"mode": "token_mask", "low": 0.5},
    {"tools": True, "split": "2x4"},
    {"mode": "token_truncate", "tools": True, "threshold": 0.5},
]
OF_GMPO: list[dict[str, Any]] = [
    {"mode": "sequence_truncate"},
    {"correction": False},
    {"correction": False, "threshold": 0.1},
]


def sampler_cases(seed: int) -> Iterator[CheckCase]:
    """Every mode with every bound, and each other setting with a mode of tokens and of sequences; some of GMPO's."""
    yield from (("gmpo-trainer", own) for own in OF_GMPO)
    for mode, low, high in itertools.product(MODES, (None, 0.5), (2.0, 30.0)):
        yield "grpo-trainer", {"mode": mode, "low": low, "high": high}
    for mode in ("token_truncate", "sequence_mask"):
        for name in ("correction", "loss", "beta", "split", "tools", "missing", "threshold"):
            yield from (("grpo-trainer", {"mode": mode, name: value}) for value in SAMPLER[name].choices or ())


@check(
    "sampler",
    ("grpo-trainer", "gmpo-trainer"),
    SAMPLER,
    sampler_cases,
    pr=[("grpo-trainer", s) for s in SAMPLED],
    covered=always,
    paths=EVERY_PATH,
)
def sampler(call: CheckCall) -> Iterator[Quantity]:
    """Loss and every gradient by exp(log π - log π_sampler), truncated or masked as the mode says."""
    s, trainer = call.settings, call.case.family
    if trainer == "gmpo-trainer" and s.correction and s.mode.startswith("token"):
        raise Unsupported("nothing says where the ratios of tokens stand in a geometric mean")
    settings = twin(trainer, loss=s.loss, beta=s.beta, split=s.split, tools=s.tools)
    options, given = _options(call), log_probs(Window.of(trainer).sequences, s.missing, s.tools)
    reported = [[None if math.isnan(x) else x for x in logps.tolist()] for logps in given]
    run = Run(trainer, settings, call.path, reported=reported, **recorder.LOGGED, **options)
    run.built.use_vllm = True
    weigh = functools.partial(ratio, s, padded(given)) if s.correction else None
    masked = {} if s.threshold is None else {"policy": {FIELDS["threshold"]: s.threshold}, "sampled": padded(given)}
    loss = Loss(run.window, run.s, ratio=weigh, **masked)
    yield from judged(call, run, loss)

    def told(model: Any) -> dict[str, Tensor]:
        """The ratios that weigh, of the policy's own tokens or of sequences."""
        scored = Scored(model, run.window.sequences)
        mask = padded([loss.counted(tokens).double() for tokens in scored.completions])
        found = ratio(s, padded(given), padded(scored.tokens), mask)
        found = found[mask > 0] if found.shape == mask.shape else found
        sizes = {"mean": found.mean(), "min": found.min(), "max": found.max()}
        return {f"sampling/importance_sampling_ratio/{name}": size for name, size in sizes.items()}

    if s.correction:
        policy = stored_window.policy(settings.model, torch.float64)
        yield from logged(measured(policy, told), drive.logged(run.built))


def _options(call: CheckCall) -> dict[str, Any]:
    """The config's fields of the correction. Raises Unsupported where the installed version has none, or lacks a setting
    that is not at its default; one without modes truncates the ratios of tokens."""
    s, correction = call.settings, "vllm_importance_sampling_correction"
    moved = {"mode": s.mode != "token_truncate", "low": s.low is not None, "threshold": s.threshold is not None}
    drive.needs(call.trainer, correction, *(FIELDS[name] for name, there in moved.items() if there))
    newer = "vllm_importance_sampling_clip_max" in trl.fields(drive.config(call.trainer))
    wanted = {correction: s.correction} | {field: getattr(s, name) for name, field in FIELDS.items()}
    return wanted | {f"vllm_importance_sampling_{'clip_max' if newer else 'cap'}": s.high}


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
