"""Advantages: groups without spread, completions without a reward, weights, normalisation.

The trainer generates for real; the reward functions return a table by position, so that the definition is known.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from parity.case.inputs import Setting
from parity.errors import Unsupported
from parity.judge.oracle import Oracle
from parity.judge.problem import Problem
from parity.trainers.check import CheckCall, CheckCase, Quantity, always, check, entry, summed
from parity.trainers.definitions.baselines import Baseline
from parity.trainers.rig import drive, models, stored_window
from parity.trainers.rig.drawn import uniform
from parity.upstream import trl

GROUP = 4
NOBODY = math.nan
ALIKE = "frac_reward_zero_std"
AGGREGATION, LATE = "multi_objective_aggregation", "normalize_then_sum"
REWARDS: dict[str, str] = {
    "spread": "every completion scored, one function; two of them at their group's mean",
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
    "scale_rewards": Setting("group", "GRPO, SDPO: by what spread rewards are divided", ("group", "batch", "none")),
    AGGREGATION: Setting("sum_then_normalize", "GRPO: of several functions", ("sum_then_normalize", LATE)),
    "normalize": Setting(False, "RLOO: normalize_advantages", (False, True)),
}
PR: list[CheckCase] = [("grpo-trainer", {"rewards": "weighted"} | late) for late in ({}, {AGGREGATION: LATE})]
PR += [("rloo-trainer", {"rewards": "none", "normalize": True})]
SDPO = "sdpo-trainer"
TRAINERS = ("grpo-trainer", "rloo-trainer", SDPO)


def cases(seed: int) -> Iterator[CheckCase]:
    for rewards in REWARDS:
        yield from (("grpo-trainer", {"rewards": rewards, "scale_rewards": s}) for s in ("group", "batch", "none"))
        yield "grpo-trainer", {"rewards": rewards, AGGREGATION: LATE}
        yield from (("rloo-trainer", {"rewards": rewards, "normalize": normalize}) for normalize in (False, True))
        yield from ((SDPO, {"rewards": rewards, "scale_rewards": s}) for s in ("group", "batch"))


@check("advantages", TRAINERS, SETTINGS, cases, pr=PR, covered=always, paths=("released",), moves=True)
def advantages(call: CheckCall) -> Iterator[Quantity]:
    """Advantages of a generation batch, by their definition: (r - mean) / (std + 1e-4) in a group, or leave-one-out."""
    rewards, weights = table(call.settings.rewards)
    found, reward, alike = _asked(call, rewards, weights)
    oracle = definition(call, rewards, weights)
    exact = oracle.exact["advantages"]
    i = int((found.double() - exact).abs().nan_to_num(math.inf).argmax())
    message = f"completion {i % GROUP} of group {i // GROUP}: {float(found[i]):.6g} instead of {float(exact[i]):.6g}"
    yield entry("advantages", found, oracle, message)
    yield entry("reward", torch.tensor(reward), oracle, "the logged mean of the weighted rewards")
    if not (math.isnan(alike) or rewards.isnan().any()):
        groups = (rewards * torch.tensor(weights)).sum(1).split(1 if call.settings.rewards == "group-of-one" else GROUP)
        share = [float((group == group[0]).all()) / len(groups) for group in groups]
        yield summed(ALIKE, alike, share, "the share of completions in groups whose rewards are all alike")


def definition(call: CheckCall, rewards: Tensor, weights: list[float]) -> Oracle:
    """The advantages (completions,) of rewards (completions, functions), NaN where a function does not score; `reward`: the
    mean of those that have one."""
    s, by = call.settings, ~rewards.isnan()
    how = {"scale": s.scale_rewards, "late": getattr(s, AGGREGATION) == LATE, "normalize": s.normalize}
    rule = Baseline(1 if s.rewards == "group-of-one" else GROUP, others=call.spec.baseline != "group", **how)

    def define(rewards: Tensor) -> dict[str, Tensor]:
        reward = torch.where(by, rewards * torch.tensor(weights), 0.0).sum(1).sum() / by.any(1).sum()
        return {"advantages": rule.of(rewards, by, torch.tensor(weights)), "reward": reward}

    return Problem(define, {"rewards": rewards.nan_to_num(0.0).float()}, {}, ()).oracle


def table(name: str) -> tuple[Tensor, list[float]]:
    """Rewards (completions, functions), NaN where a function does not score; two groups; and the functions' weights."""
    rows = 2 if name == "group-of-one" else 2 * GROUP
    out = (8 * uniform(11, "rewards", (rows, 2 if name == "weighted" else 1))).round() / 4
    if name == "spread":
        out[:GROUP] = torch.tensor([[0.0], [2.0], [1.0], [1.0]])
    elif name == "equal":
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


def _asked(call: CheckCall, rewards: Tensor, weights: list[float]) -> tuple[Tensor, float, float]:
    """What the trainer makes of the table, on completions that it generated; what it logs as `reward` and `ALIKE`, or NaN."""
    s, known = call.settings, trl.fields(drive.config(call.trainer))
    alone = s.rewards == "group-of-one"
    wanted: dict[str, Any] = {"beta": 0.0, "num_generations": GROUP, "per_device_train_batch_size": 2 * GROUP}
    wanted |= {"max_completion_length": 3, "reward_weights": weights, "gradient_checkpointing": False}
    switched = isinstance(known.get("scale_rewards"), bool)
    if switched and s.scale_rewards == "batch":
        raise Unsupported("scale_rewards of the installed version is on or off")
    wanted |= {"scale_rewards": s.scale_rewards == "group" if switched else s.scale_rewards}
    wanted |= {"normalize_advantages": s.normalize}
    needed: dict[str, Any] = {"num_generations_eval": 1} if alone else {}
    needed |= {AGGREGATION: LATE} if getattr(s, AGGREGATION) == LATE else {}
    drive.needs(call.trainer, *needed)

    def returning(column: list[float]) -> Callable[..., list[float | None]]:
        given = [None if math.isnan(r) and s.rewards != "nan" else r for r in column]
        return lambda completions, **kwargs: given

    functions = [returning(column) for column in rewards.T.tolist()]
    model = models.model("llama")
    trainer = drive.build(call.trainer, model, wanted | needed, call.device, reward_funcs=functions)
    prompts = [sample.prompt for sample in stored_window.brief()[:2]]
    batch = [{"prompt": p} for p in prompts for _ in range(1 if alone else GROUP)]
    trainer.model.train(not alone)
    with trl.quiet(), drive.seeded():
        sdpo = hasattr(trainer, "_prepare_training_batch")
        out = (trainer._prepare_training_batch if sdpo else trainer._generate_and_score_completions)(batch)
    log = trainer._metrics["eval" if alone else "train"]
    reward = log.get("reward") or log["self_distillation/reward_mean"]
    return out["advantages"].detach().cpu(), reward[-1], log.get(ALIKE, [math.nan])[-1]
