"""Asynchronous GRPO: one optimizer window of stored rollouts, ratios to an older policy, by its definition."""

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from parity.case.inputs import Setting
from parity.trainers.check import CheckCall, CheckCase, CheckResult, bounded, by_profile, check, holds, judged, shared
from parity.trainers.definitions import training_step, windows
from parity.trainers.definitions.balance import balance
from parity.trainers.definitions.gradients import first_step
from parity.trainers.definitions.training_step import ExactStep
from parity.trainers.rig import drive, queued, recorder, stored_window, twin_runs
from parity.trainers.rig.stored_window import Sequences

CLIP = (0.2, 0.28)
"""ε and ε_high: ratios lie within and beyond both."""
EXPERTS, COEFFICIENT = "qwen3_moe", 0.5
SETTINGS = {
    "model": Setting("llama", "tiny model; experts with router_aux_loss_coef", ("llama", "qwen2", EXPERTS)),
    "split": Setting("8x1", "batch x accumulation", ("8x1", "4x2", "2x4")),
    "tools": Setting(False, "some completion tokens are a tool's", (False, True)),
}


@by_profile(
    pr=[("async-grpo-trainer", s) for s in ({}, {"split": "2x4", "tools": True}, {"model": EXPERTS, "split": "4x2"})]
)
def cases(seed: int) -> Iterator[CheckCase]:
    """Every model, cut and with tools."""
    for model in SETTINGS["model"].choices or ():
        for split in SETTINGS["split"].choices or ():
            yield "async-grpo-trainer", {"model": model, "split": split}
        yield "async-grpo-trainer", {"model": model, "tools": True}


@check("async-step", ("async-grpo-trainer",), SETTINGS, cases)
def async_step(call: CheckCall) -> Iterator[CheckResult]:
    """Prefixes packed as trees, ratios beyond the clip: loss, every gradient and the logged ratios of the definition."""
    s = call.settings
    batch, accumulation = map(int, s.split.split("x"))
    experts = s.model == EXPERTS
    window = stored_window.sequences(stored_window.rows(4), generated=True)
    if experts:  # a balance over packed prefixes is no sum over sequences: none begins like another
        window = [([3 + i, *tokens], start + 1) for i, (tokens, start) in enumerate(window)]
    kept = [twin_runs.external(torch.tensor(t[n:])) if s.tools else torch.ones(len(t) - n).long() for t, n in window]
    older = stored_window.policy(s.model, torch.float64, stored_window.OLDER)
    with torch.no_grad():
        old = windows.completion_logps(older, window)
    weight = {"router_aux_loss_coef": COEFFICIENT} if experts else {}
    if weight:
        drive.needs(call.trainer, *weight)
    config: dict[str, Any] = {
        "per_device_train_batch_size": batch,
        "gradient_accumulation_steps": accumulation,
        **weight,
    }
    config |= {"epsilon": CLIP[0], "epsilon_high": CLIP[1], "logging_strategy": "steps", "logging_steps": 1}
    run = queued.build(s.model, window, kept, old, windows.advantages(window), **config)
    with drive.fixed(call, run):
        steps = recorder.train(run)
    model = functools.partial(stored_window.policy, s.model, torch.float64)
    define = functools.partial(_loss, window, kept, old, batch, COEFFICIENT if experts else 0.0)
    yield from first_step(shared(call, "step", lambda: ExactStep(model(), define)), steps)
    if accumulation == 1 and not s.tools:
        truth = shared(call, "logged", lambda: training_step.Scalars(model(), functools.partial(_logged, window, old)))
        logged = drive.logged(run)
        for name, exact in truth.exact.items():
            yield judged(name, truth.judge(name, float(logged[name])), float(logged[name]), exact)
        share = windows.beyond("", window, windows.Generation(window, older, 1), CLIP, model()).tolist()
        yield holds("beyond", all(0 < x < 0.5 for x in share), f"{share}: the case tests nothing", gate="exact")
        for side, x in zip(("low", "high", "region"), (*share, sum(share)), strict=True):
            name = f"clip_ratio/{side}_mean"
            yield bounded(name, float(logged[name]), x, 2.0**-22, "the share of the tokens beyond the bound")


def _loss(
    window: Sequences, kept: list[Tensor], old: list[Tensor], batch: int, coefficient: float, model: Any
) -> Tensor:
    """The mean over micro-batches of -Σ min(ρA, clip(ρ)A)/N + coefficient·balance, N its own tokens: as its source says."""
    a = windows.advantages(window)
    terms = []
    for t, o, k, sign in zip(windows.completion_logps(model, window), old, kept, a, strict=True):
        ratio = (t - o).exp()
        terms.append(torch.minimum(ratio * sign, ratio.clamp(1 - CLIP[0], 1 + CLIP[1]) * sign)[k.bool()])
    means = []
    for i in range(0, len(window), batch):
        means.append(-torch.cat(terms[i : i + batch]).mean())
        if coefficient:
            means[-1] = means[-1] + coefficient * balance(model, [t for t, _ in window[i : i + batch]])
    return torch.stack(means).mean()


def _logged(window: Sequences, old: list[Tensor], model: Any) -> dict[str, Tensor]:
    """ratio: mean of ρ; kl: mean of ρ - 1 - log ρ; entropy of the policy; over the tokens."""
    logps, entropy = [], []
    for z, (tokens, start) in zip(training_step.logits(model, [t for t, _ in window]), window, strict=True):
        table = torch.log_softmax(z[start - 1 : -1], -1)
        logps.append(table.gather(-1, torch.tensor(tokens[start:]).unsqueeze(-1))[:, 0])
        entropy.append(-(table.exp() * table).sum(-1))
    d = torch.cat(logps) - torch.cat(old)
    return {"ratio": d.exp().mean(), "kl": (torch.expm1(d) - d).mean(), "entropy": torch.cat(entropy).mean()}
