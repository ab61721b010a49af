"""What a trainer makes of rewards, held against its definition: the advantages of completions."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from parity.judge.shaken import Rounded, unit
from parity.trainers.definitions.baselines import Baseline
from parity.watching.definition import BETWEEN, OPERATIONS

NAMES = {"GRPOTrainer": "GRPO", "RLOOTrainer": "RLOO"}
_DRAWS = 16  # of each entry by itself: one of four may be small where the error is not
_SCALES = "group", "batch", "none"


def faults(
    trainer: Any, rewards: Any, batch: Mapping[str, Any], scored: Sequence[Tensor] = ()
) -> tuple[str, list[str]] | None:
    """Where the advantages (B,) of a rank's `batch` are not `Baseline`'s of the `rewards` (N, F) of all ranks, NaN where a
    function does not score: which, and what they are, if that is known. RLOO's rewards, clipped, are less beta times the KL of
    the two log-probs (B, T) `scored`, policy's and reference's. Allowed is what float32 makes of the definition's operations.
    Not of trainers with other advantages, of other shapes, of rewards that are infinite or in 16 bits, of groups of other
    sizes, or of RLOO's KL on several ranks."""
    found: Any = batch.get("advantages")
    name = next((NAMES[c.__name__] for c in type(trainer).__mro__ if c.__name__ in NAMES), "")
    if not name or getattr(rewards, "shape", ())[1:] != (len(trainer.reward_weights),):
        return None
    args, size = trainer.args, len(rewards) // trainer.accelerator.num_processes
    if getattr(found, "shape", None) != (size,) or len(rewards) % trainer.num_generations:
        return None
    if rewards.dtype.itemsize < 4 or bool(rewards.isinf().any()):
        return None
    clip, beta = getattr(args, "reward_clip_range", None), args.beta if name == "RLOO" else 0.0
    if beta and (len(scored) != 2 or trainer.accelerator.num_processes > 1):
        return None
    scale = getattr(trainer, "scale_rewards", "group")
    rule = Baseline(
        trainer.num_generations,
        scale if isinstance(scale, str) else ("none", "group")[scale],  # a bool in older releases
        getattr(trainer, "multi_objective_aggregation", "") == "normalize_then_sum",
        name == "RLOO",
        getattr(args, "normalize_advantages", False),
    )
    found, weights, rewards = (x.detach().double().cpu() for x in (found, trainer.reward_weights, rewards))
    by, rewards = ~rewards.isnan(), rewards.nan_to_num(0.0)
    here = torch.arange(size) + trainer.accelerator.process_index * size

    def advantages(rule: Baseline, weights: Tensor, beta: float, dtype: torch.dtype = torch.float64) -> Tensor:
        earned, weights = rewards.to(dtype), weights.to(dtype)
        if name != "RLOO":
            return rule.of(earned, by, weights)
        x = torch.where(by, earned * weights, 0.0).sum(1)
        x = x if clip is None else x.clamp(*clip)
        if beta:
            old, ref = (logps.to("cpu", dtype) for logps in scored)
            x = x - beta * ((old - ref) * batch["completion_mask"].cpu()).sum(1)
        return rule.of(x[:, None], by.any(1)[:, None], torch.ones(1, dtype=dtype))

    def of(rule: Baseline, weights: Tensor = weights, beta: float = beta, draws: int = _DRAWS) -> tuple[Tensor, Tensor]:
        """The advantages (B,), and by how much each may be off."""
        exact = advantages(rule, weights, beta)
        bound = torch.full_like(exact, OPERATIONS * unit(torch.float32) * float(exact.abs().amax()))
        # of equal rewards all sums are off alike, which no draw is
        narrow = advantages(rule, weights, beta, torch.float32).double()
        bound = bound.maximum(BETWEEN * (narrow - exact).abs().nan_to_num(0.0, 0.0))
        for seed in range(draws):
            with Rounded(seed):
                bound = bound.maximum(BETWEEN * (advantages(rule, weights, beta) - exact).abs())
        return exact[here], bound[here]

    if _fits(found, *of(rule, draws=0)):  # draws only allow more
        return None
    right, bound = of(rule)
    if _fits(found, right, bound):
        return None
    off = (found - right).abs()
    if rule.others:
        tried = {"less the mean of the whole group": of(replace(rule, others=False, scale="none"))}
        tried |= {"without the KL": of(rule, beta=0.0), "with the KL turned in sign": of(rule, beta=-beta)}
    else:
        tried = {f"as with scale_rewards={s!r}": of(replace(rule, scale=s, late=False)) for s in _SCALES}
        tried |= {"as with normalize_then_sum": of(replace(rule, late=True))}
    tried |= {
        "not divided by n - 1, but by n": of(replace(rule, less=0)),
        "less the mean of the batch, not of the group": of(replace(rule, group=len(rewards))),
        "without reward_weights": of(rule, torch.ones_like(weights)),
        "the rewards themselves": ((rewards * weights).sum(1)[here], bound),
        "turned in sign": (-right, bound),
        "in another order": (right.sort().values[found.argsort().argsort()], bound),
    }
    named = [cause for cause, (x, wide) in tried.items() if _fits(found, x, wide) and not _fits(right, x, bound + wide)]
    i = int(off.nan_to_num(math.inf).argmax())
    return f"advantages are not {name}'s of the rewards, {float(found[i]):.6g} for {float(right[i]):.6g}", named


def _fits(found: Tensor, other: Tensor, bound: Tensor) -> bool:
    return bool(((found - other).abs() <= bound).all())
