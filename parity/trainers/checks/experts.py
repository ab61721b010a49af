"""Mixtures of experts: the load-balancing loss that a trainer adds, with its weight, once for each micro-batch."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from parity.case.inputs import Setting
from parity.trainers.check import CheckCall, CheckCase, Quantity, by_profile, check, shared
from parity.trainers.checks.twins import plain_twin
from parity.trainers.definitions import twin_losses
from parity.trainers.definitions.balance import balance
from parity.trainers.definitions.gradients import first_step
from parity.trainers.definitions.training_step import exact_step
from parity.trainers.rig import batches, drive, stored_window, twin_runs

MODEL = "qwen3_moe"
FIELD = "router_aux_loss_coef"
SETTINGS = {
    "coefficient": Setting(0.5, f"{FIELD} of the trainer's config", (0.5, 0.0)),
    "split": Setting("8x1", "batch x accumulation", ("8x1", "4x2")),
}
TRAINERS = ("grpo-trainer", "rloo-trainer", "sft-trainer", "dpo-trainer", "kto-trainer")


@by_profile(pr=[(trainer, {"split": "4x2"}) for trainer in TRAINERS])
def cases(seed: int) -> Iterator[CheckCase]:
    """Every trainer with and without accumulation, and with the loss turned off."""
    for trainer in TRAINERS:
        yield trainer, {}
        yield trainer, {"split": "4x2"}
        yield trainer, {"coefficient": 0.0}


@check("experts", TRAINERS, SETTINGS, cases)
def experts(call: CheckCall) -> Iterator[Quantity]:
    """Loss and gradients are those of the trainer's loss plus coefficient times the mean over micro-batches of the balance."""
    trainer, s = call.case.family, call.settings
    drive.needs(call.trainer, FIELD)
    twin = plain_twin(model=MODEL, split=s.split)
    run = twin_runs.build(trainer, twin, twin_runs.unfixed(call.path), **{FIELD: s.coefficient})
    steps = twin_runs.train(run, call.path)
    yield twin_runs.all_there(trainer, steps)
    loss = twin_losses.definition(trainer, twin)
    parts = [[tokens for tokens, _ in batches.sequences_of([batch])] for batch in steps.batches]

    def define(model: Any) -> Tensor:
        return loss(model) + s.coefficient * torch.stack([balance(model, part) for part in parts]).mean()

    yield from first_step(
        shared(call, "step", lambda: exact_step(stored_window.policy(MODEL, torch.float64), define)), steps
    )
