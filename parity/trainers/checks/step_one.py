"""KL at step 1: the policy is the reference, so KL, log-ratios and what follows from them are machine zero.

Bounds. A log-prob of the policy and one of the reference are two correct evaluations of one definition; each may be off
by g = 6·rms of that token's log-prob over Monte Carlo replicas of the model (the judge's row gate). So |d| ≤ D = 2g for
the log-ratio d of a token, exp(d) - d - 1 ≤ D²/2·exp(D) for its KL, plus 4u for evaluating that near 1.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from parity.case.inputs import Setting
from parity.errors import Unsupported
from parity.judge.oracle import Oracle
from parity.trainers.check import CheckCall, CheckCase, Entry, Quantity, bounded, by_profile, check, holds, pairwise
from parity.trainers.definitions import log_probs, windows
from parity.trainers.definitions.log_probs import Truth, U
from parity.trainers.rig import drive, models
from parity.trainers.rig.first_step import FirstStep, run
from parity.upstream import trl

SETTINGS = {
    "model": Setting("llama", "tiny model", tuple(models.ARCHITECTURES)),
    "beta": Setting(0.04, "weight of the KL term, never 0 here", (0.04, 1.0)),
    "adapter": Setting("none", "full fine-tuning with a separate reference, or LoRA", ("none", "lora")),
    "checkpointing": Setting(
        drive.OFF, "gradient checkpointing", (drive.OFF, drive.REENTRANT, drive.NON_REENTRANT, drive.CUSTOM)
    ),
    "temperature": Setting(1.0, "of sampling and of the log-probs", (1.0, 0.7)),
    "padding_free": Setting(False, "packed without padding, where the trainer can", (False, True)),
}
TRAINERS = ("grpo-trainer", "rloo-trainer", "online-dpo-trainer", "dpo-trainer")
ABSENT = dict.fromkeys(TRAINERS, ("padding_free",)) | {"dpo-trainer": ("padding_free", "temperature")}
"""What a trainer has no option for: one case asks whether that still holds, the others do without it."""
A_FEW: tuple[tuple[str, Mapping[str, Any]], ...] = (
    ("grpo-trainer", {"model": "gemma4"}),
    ("grpo-trainer", {"model": "llama", "adapter": "lora", "checkpointing": drive.CUSTOM, "beta": 1.0}),
    ("rloo-trainer", {"model": "cohere", "temperature": 0.7}),
    ("dpo-trainer", {"model": "gemma2", "checkpointing": drive.NON_REENTRANT}),
    ("online-dpo-trainer", {"model": "llama"}),
    *((trainer, {"checkpointing": drive.CUSTOM}) for trainer in TRAINERS),
    *((trainer, {"model": "gemma2"}) for trainer in ("grpo-trainer", "rloo-trainer")),  # softcap on attention scores
)


@by_profile(quick=A_FEW[:2], pr=A_FEW)
def cases(seed: int) -> Iterator[CheckCase]:
    """Every pair of values, per trainer."""
    yield from A_FEW
    for number, trainer in enumerate(TRAINERS):
        yield trainer, {"padding_free": True}
        for case in pairwise({k: v for k, v in SETTINGS.items() if k not in ABSENT[trainer]}, seed + number):
            yield trainer, case


@check("step-one", TRAINERS, SETTINGS, cases, paths=("released", "fused", "fixed"), moves=True)
def step_one(call: CheckCall) -> Iterator[Quantity]:
    """With the policy equal to the reference the first step shows no KL, no log-ratio and the loss of ratio 1."""
    step = run(call)
    truth = log_probs.truth(call, step.ids, step.mask, step.completion)
    yield from _log_probs(step, truth)
    yield from METRICS[call.trainer](call, step, truth)
    if call.settings.checkpointing == drive.CUSTOM:
        first = next(iter(step.lost), "")
        message = f"{first} lost its own checkpointing function during the step"
        yield holds("checkpointing", not step.lost, message, value=float(len(step.lost)), exact=0.0)
    norm = step.log.get("grad_norm")
    finite = norm is not None and math.isfinite(float(norm))
    yield holds("grad_norm", finite, f"grad_norm is {norm}", value=None if norm is None else float(norm))


def _log_probs(step: FirstStep, truth: Truth) -> Iterator[Quantity]:
    """Log-probs of policy and reference against the model's own logits, and against each other."""
    for name, value in (("logps", step.policy), ("ref_logps", step.reference)):
        if value is not None:
            t = value.shape[1]
            counted = truth.counted[:, -t:]
            oracle = Oracle(
                {name: truth.logps[:, -t:][counted]},
                lambda *asked, t=t, counted=counted, name=name: {name: truth.replicas[:, :, -t:][:, counted]},
                lambda name, found: {"entrywise": True},
                seed=0,
            )
            yield Quantity(name, value.detach().cpu()[counted], Entry(oracle, name), _first(value, truth))
    if step.policy is not None and step.reference is not None:
        t = step.policy.shape[1]
        counted = truth.counted[:, -t:]
        d = (step.policy - step.reference).detach().cpu().double()[counted].abs()
        yield bounded("log_ratio", d, torch.zeros_like(d), truth.apart[:, -t:][counted], "policy and reference differ")


def _first(value: Tensor, truth: Truth) -> str:
    """Where policy or reference first differs from the definition."""
    t = value.shape[1]
    e = (value.detach().cpu().double() - truth.logps[:, -t:]).abs() * truth.counted[:, -t:]
    beyond = (e > truth.apart[:, -t:]).nonzero()
    if len(beyond) == 0:
        return ""
    b, i = (int(k) for k in beyond[0])
    return (
        f"first at sequence {b}, completion token {i}: {float(value[b, i]):.5g} instead of "
        f"{float(truth.logps[b, i - t]):.5g} by the model's own logits"
    )


def _metric(step: FirstStep, key: str) -> float:
    if key not in step.log:
        raise Unsupported(f"the trainer logged no {key}: no KL was computed")
    return float(step.log[key])


def _grpo(call: CheckCall, step: FirstStep, truth: Truth) -> Iterator[Quantity]:
    assert step.advantages is not None
    kl = _metric(step, "kl")
    bound = float(truth.kl[truth.counted].max())
    yield bounded("kl", kl, 0.0, bound, f"KL {kl:.4g} at step 1, at most {bound:.2g} is rounding")
    if step.policy is not None and step.reference is not None:  # a fused loss hands out no log-probs
        yield _recomputed(kl, step, windows.k3)
    exact, terms = loss_at_ratio_one(step, "loss_type" in trl.fields(drive.config(call.trainer)))
    allowed = call.settings.beta * bound + (terms + 8) * U * float(step.advantages.abs().mean())
    yield bounded("loss", step.loss, exact, allowed, f"loss {step.loss:.5g} at ratio 1 and KL 0, expected {exact:.5g}")


def loss_at_ratio_one(step: FirstStep, has_loss_types: bool) -> tuple[float, int]:
    """-mean of the advantages, and how many terms a sum of it has: over sequences (grpo), -Σ A_i/B, or over tokens (bnpo),
    -Σ A_i·|o_i|/Σ |o_i|, where the release has no loss types and averages over tokens: TRL 0.16."""
    assert step.advantages is not None
    advantages = step.advantages.double()
    if has_loss_types or not trl.since("0.16.0"):
        return -float(advantages.mean()), drive.COMPLETION
    lengths = step.completion.sum(1).double().to(advantages.device)
    return -float((advantages * lengths).sum() / lengths.sum()), int(lengths.sum())


def _recomputed(kl: float, step: FirstStep, of: Any) -> Quantity:
    """The trainer's metric against the definition on its own log-probs: the mean over completion tokens."""
    assert step.policy is not None and step.reference is not None
    t = step.policy.shape[1]
    counted = step.completion[:, -t:].bool().cpu()
    d = (step.reference - step.policy).detach().cpu()[counted]
    exact = float(of(d.double()).mean())
    # exp(d), the subtraction of d and of 1: u each of what they are near, and the mean's own
    allowed = float(
        (U * (3 * d.double().exp() + 2 * d.double().abs() + 1)).mean()
    ) + counted.sum().item() ** 0.5 * U * abs(exact)
    return bounded(
        "kl by its own log-probs", kl, exact, allowed, f"the metric says {kl:.5g}, its own log-probs {exact:.5g}"
    )


def _rloo(call: CheckCall, step: FirstStep, truth: Truth) -> Iterator[Quantity]:
    assert step.advantages is not None
    kl = _metric(step, "kl")
    bound = float(truth.apart[truth.counted].max())
    yield bounded("kl", kl, 0.0, bound, f"mean log-ratio {kl:.4g} at step 1, at most {bound:.2g} is rounding")
    # the sequence's ratio is exp of a sum of differences, each at most D
    drift = math.expm1(float((truth.apart * truth.counted).sum(1).max()))
    size, exact = float(step.advantages.abs().mean()), -float(step.advantages.double().mean())
    yield bounded(
        "loss", step.loss, exact, (drift + 8 * U) * size, f"loss {step.loss:.5g} at ratio 1, expected {exact:.5g}"
    )


def _pairs(call: CheckCall, step: FirstStep, truth: Truth) -> Iterator[Quantity]:
    sums = (truth.apart * truth.counted).sum(1)
    bound = call.settings.beta * float(sums.max())
    for key in ("rewards/chosen", "rewards/rejected"):
        value = _metric(step, key)
        yield bounded(key, value, 0.0, bound, f"{key} {value:.4g} at step 1, at most {bound:.2g} is rounding")
    yield _ln2(step, bound)
    kept = truth.logps * truth.counted
    exact = kept.sum(1).chunk(2)
    for key, rows in (("logps/chosen", exact[0]), ("logps/rejected", exact[1])):
        value, truly = _metric(step, key), float(rows.mean())
        allowed = float(sums.max()) / 2 + drive.COMPLETION * U * abs(truly)
        yield bounded(key, value, truly, allowed, f"{key} {value:.6g}, {truly:.6g} by the model's own logits")


def _online(call: CheckCall, step: FirstStep, truth: Truth) -> Iterator[Quantity]:
    kl = _metric(step, "objective/kl")
    assert step.policy is not None
    sums = float(truth.apart[:, -step.policy.shape[1] :].sum(1).max())  # the metric sums over padded completions too
    yield bounded("kl", kl, 0.0, sums, f"KL {kl:.4g} at step 1, at most {sums:.2g} is rounding")
    yield _ln2(step, call.settings.beta * sums)


def _ln2(step: FirstStep, bound: float) -> Quantity:
    """-log σ(0); its slope there is 1/2, of a difference of two sums."""
    message = f"loss {step.loss:.6g} at log-ratio 0, expected ln 2"
    return bounded("loss", step.loss, math.log(2.0), bound + 4 * U, message)


METRICS = {"GRPOTrainer": _grpo, "RLOOTrainer": _rloo, "DPOTrainer": _pairs, "OnlineDPOTrainer": _online}
