"""Advantages: groups without spread, completions without a reward, weights, normalisation.

The trainer generates for real; the reward functions return a table by position, so that the definition is known.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from parity.case.case import uniform
from parity.case.inputs import Setting
from parity.errors import Unsupported
from parity.judge.recipe import UNIT_ROUNDOFF
from parity.trainers.check import CheckCall, CheckCase, Quantity, bounded, by_profile, check
from parity.trainers.rig import drive, models, stored_window
from parity.upstream import trl

U = UNIT_ROUNDOFF["fp32"]
EPSILON = 1e-4
"""What TRL adds to a standard deviation."""
GROUP = 4
NOBODY = math.nan

REWARDS: dict[str, str] = {
    "spread": "every completion scored, one function",
    "equal": "a group without spread beside one with it",
    "none": "one completion that the function returns None for",
    "nan": "one completion that the function returns NaN for",
    "all-none": "a group in which no completion was scored",
    "single": "a group in which one completion was scored",
    "group-of-one": "evaluation with num_generations_eval=1: nothing to compare with, so 0",
    "weighted": "two functions, weights 1 and -0.5, each with a None of its own and one completion without any",
}
SETTINGS = {
    "rewards": Setting("spread", "; ".join(f"{k}: {v}" for k, v in REWARDS.items()), tuple(REWARDS)),
    "scale_rewards": Setting("group", "GRPO: by what spread rewards are divided", ("group", "batch", "none")),
    "aggregation": Setting(
        "sum_then_normalize", "GRPO: of several functions", ("sum_then_normalize", "normalize_then_sum")
    ),
    "normalize": Setting(False, "RLOO: normalize_advantages", (False, True)),
    "clipped": Setting(False, "RLOO: reward_clip_range of 0.5 to 1.25, of the weighted sum", (False, True)),
}
CLIP = (0.5, 1.25)


@by_profile(pr=[("grpo-trainer", {"rewards": "weighted"})], covered=lambda case: True)
def cases(seed: int) -> Iterator[CheckCase]:
    yield "grpo-trainer", {"rewards": "weighted"}
    for rewards in REWARDS:
        for scale in ("group", "batch", "none"):
            yield "grpo-trainer", {"rewards": rewards, "scale_rewards": scale}
        yield "grpo-trainer", {"rewards": rewards, "aggregation": "normalize_then_sum"}
        for normalize in (False, True):
            yield "rloo-trainer", {"rewards": rewards, "normalize": normalize}
        yield "rloo-trainer", {"rewards": rewards, "clipped": True}


@check("advantages", ("grpo-trainer", "rloo-trainer"), SETTINGS, cases, paths=("released",), moves=True)
def advantages(call: CheckCall) -> Iterator[Quantity]:
    """Advantages of a generation batch, by their definition: (r - mean) / (std + 1e-4) in a group, or leave-one-out."""
    rewards, weights = table(call.settings.rewards)
    found = _asked(call, rewards, weights)
    if call.settings.rewards == "group-of-one":
        exact = allowed = torch.zeros(len(rewards), dtype=torch.float64)
    else:
        exact, allowed = DEFINITION[call.trainer](call, rewards, weights)
    error = (found.double() - exact).abs()
    i = int((error / allowed).masked_fill(error == 0, 0.0).nan_to_num(math.inf).argmax())
    message = f"completion {i % GROUP} of group {i // GROUP}: {float(found[i]):.6g} instead of {float(exact[i]):.6g}"
    yield bounded("advantages", found, exact, allowed, message)


def table(name: str) -> tuple[Tensor, list[float]]:
    """Rewards (completions, functions), NaN where a function does not score; two groups; and the functions' weights."""
    rows = 2 if name == "group-of-one" else 2 * GROUP
    out = (8 * uniform(11, "rewards", (rows, 2 if name == "weighted" else 1))).round() / 4
    if name == "equal":
        out[:GROUP] = out[0, 0]
    elif name in ("none", "nan"):
        out[1] = NOBODY
    elif name == "all-none":
        out[:GROUP] = NOBODY
    elif name == "single":
        out[1:GROUP] = NOBODY
    elif name == "weighted":
        out[0, 0], out[2, 1] = NOBODY, NOBODY
        out[5] = NOBODY
    return out, [1.0, -0.5][: out.shape[1]]


def _asked(call: CheckCall, rewards: Tensor, weights: list[float]) -> Tensor:
    """What the trainer makes of the table, on completions that it generated."""
    s = call.settings
    config = drive.config(call.trainer)
    wanted: dict[str, Any] = {"beta": 0.0, "num_generations": GROUP, "per_device_train_batch_size": 2 * GROUP}
    wanted |= {"max_completion_length": 3, "reward_weights": weights, "gradient_checkpointing": False}
    known = trl.fields(config)
    if call.trainer == "GRPOTrainer":
        if "multi_objective_aggregation" not in known and s.aggregation != "sum_then_normalize":
            raise Unsupported("GRPOConfig has no multi_objective_aggregation in the installed version")
        old = isinstance(known.get("scale_rewards"), bool)
        if old and s.scale_rewards == "batch":
            raise Unsupported("scale_rewards of the installed version is on or off")
        wanted |= {"scale_rewards": s.scale_rewards == "group" if old else s.scale_rewards}
        wanted |= {"multi_objective_aggregation": s.aggregation}
    else:
        if s.clipped and "reward_clip_range" not in known:
            raise Unsupported("RLOOConfig has no reward_clip_range in the installed version")
        wanted |= {"normalize_advantages": s.normalize}
        wanted |= {"reward_clip_range": CLIP} if s.clipped else {}
    functions = [_returning(column, "nan" if s.rewards == "nan" else None) for column in rewards.T.tolist()]
    if s.rewards == "group-of-one":
        wanted |= {"num_generations_eval": 1}
    needed = {"num_generations_eval"} & wanted.keys()
    trainer = drive.build(call.trainer, models.model("llama"), wanted, needed, call.device, reward_funcs=functions)
    prompts = [sample.prompt for sample in stored_window.brief()[:2]]
    alone = s.rewards == "group-of-one"
    batch = [{"prompt": p} for p in prompts for _ in range(1 if alone else GROUP)]
    trainer.model.train(not alone)
    with trl.quiet(), drive.seeded():
        out = trainer._generate_and_score_completions(batch)
    return out["advantages"].detach().cpu()


def _returning(column: list[float], missing: str | None) -> Callable[..., list[float | None]]:
    def scored(completions: Any, **kwargs: Any) -> list[float | None]:
        return [None if math.isnan(r) and missing is None else r for r in column]

    return scored


def _summed(rewards: Tensor, weights: list[float]) -> Tensor:
    """Weighted sum over the functions that scored a completion, NaN where none did, (groups, GROUP)."""
    total = (rewards * torch.tensor(weights, dtype=torch.float64)).nansum(1)
    return total.masked_fill(rewards.isnan().all(1), NOBODY).view(-1, GROUP)


def _std(x: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    """Sample standard deviation of what is not NaN; of a single value 0."""
    n = (~x.isnan()).sum(dim, keepdim=True)
    square = (x - x.nanmean(dim, keepdim=True)).square().nansum(dim, keepdim=True)
    return (square / (n - 1).clamp(min=1)).sqrt()


def _error(x: Tensor, spread: Tensor, exact: Tensor) -> Tensor:
    """Rounding of (x - mean) / spread, and of the spread: n + 4 roundings of numbers as large as the rewards."""
    size = (x.numel() + 4) * U * x.nan_to_num(0.0).abs().max()
    return size / spread * (1 + exact.abs()) + 4 * U * exact.abs()


def _grpo(call: CheckCall, rewards: Tensor, weights: list[float]) -> tuple[Tensor, Tensor]:
    s = call.settings
    if s.aggregation == "normalize_then_sum":
        return _normalised_first(rewards, weights)
    x = _summed(rewards, weights)
    centred = x - x.nanmean(1, keepdim=True)
    if s.scale_rewards == "none":
        spread = torch.ones(1, 1, dtype=torch.float64)
    else:
        spread = (_std(x, 1) if s.scale_rewards == "group" else _std(x, (0, 1))) + EPSILON
    exact = (centred / spread).nan_to_num(0.0)
    return exact.flatten(), _error(x, spread, exact).flatten()


def _normalised_first(rewards: Tensor, weights: list[float]) -> tuple[Tensor, Tensor]:
    """GDPO: each function normalised in its group, then the weighted sum over the batch."""
    grouped = rewards.view(-1, GROUP, rewards.shape[1])
    spread = _std(grouped, 1) + EPSILON
    each = (grouped - grouped.nanmean(1, keepdim=True)) / spread
    x = _summed(each.view(-1, rewards.shape[1]), weights)
    outer = _std(x, (0, 1)) + EPSILON
    exact = ((x - x.nanmean()) / outer).nan_to_num(0.0)
    inner = _error(grouped, spread, each.nan_to_num(0.0)).amax() * rewards.shape[1]
    return exact.flatten(), (_error(x, outer, exact) + inner / outer).flatten()


def _rloo(call: CheckCall, rewards: Tensor, weights: list[float]) -> tuple[Tensor, Tensor]:
    x = _summed(rewards, weights)
    if call.settings.clipped:
        x = x.clamp(*CLIP)
    n = (~x.isnan()).sum(1, keepdim=True)
    others = (x.nansum(1, keepdim=True) - x) / (n - 1)
    exact = (x - others).masked_fill(n < 2, NOBODY)
    spread = torch.ones(1, 1, dtype=torch.float64)
    if call.settings.normalize:
        spread = _std(exact, (0, 1)) + EPSILON
        exact = (exact - exact.nanmean()) / spread
    exact = exact.nan_to_num(0.0)
    return exact.flatten(), _error(x, spread, exact).flatten()


DEFINITION = {"GRPOTrainer": _grpo, "RLOOTrainer": _rloo}
