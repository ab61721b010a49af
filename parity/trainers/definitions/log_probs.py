"""The log-probs of a model's tokens by its own forward in float64, and what rounding does to them."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from parity.judge.escalation import REPLICAS
from parity.judge.gates import ROW
from parity.judge.oracle import Oracle, Quantities
from parity.judge.recipe import IEEE_FP32, UNIT_ROUNDOFF, Recipe
from parity.trainers.check import CheckCall
from parity.trainers.definitions.step_rounding import Double, StepRounding
from parity.trainers.definitions.training_step import taken
from parity.trainers.rig import checkpointing, drive, models

U = UNIT_ROUNDOFF["fp32"]
LOGPS = "logps"


def oracle(logps: Callable[[int], Tensor]) -> Oracle:
    """Of `LOGPS`, (B, T); `logps(copies)`: of so many copies of the sequences in one batch, (copies·B, T), float64."""
    with torch.no_grad(), Double():
        exact = logps(1)

    def draw(recipe: Recipe, count: int, seed: int, *others: Any) -> Quantities:
        with torch.no_grad(), Double(), StepRounding(recipe, "fp32", seed):
            return {LOGPS: logps(count).view(count, *exact.shape)}

    return Oracle({LOGPS: exact}, draw, lambda name, found: {"entrywise": True}, seed=20261120)


@dataclasses.dataclass
class Truth:
    """The definition's log-probs of the tokens after the first, float64, (B, L - 1), and what rounding does to them.

    Attributes:
        logps, replicas: exact, and (R, B, L - 1) under Monte Carlo arithmetic.
        apart: D, the most that two correct evaluations differ by at a token.
        kl: the most that exp(d) - d - 1 comes to at a token.
        counted: the tokens of completions.
    """

    logps: Tensor
    replicas: Tensor
    apart: Tensor
    kl: Tensor
    counted: Tensor


def truth(call: CheckCall, ids: Tensor, mask: Tensor, completion: Tensor) -> Truth:
    """Log-probs by the model's own forward in float64, the logits divided by the temperature."""
    s = call.settings
    model = models.model(s.model, torch.float64).eval()
    if s.checkpointing == drive.CUSTOM:
        checkpointing.install(model, checkpoint=False)
    ids, mask, completion = (x.cpu() for x in (ids, mask, completion))
    temperature = s.temperature if call.spec.scored else 1.0

    def logps(copies: int) -> Tensor:
        rows, seen = ids.repeat(copies, 1), mask.repeat(copies, 1)
        z = model(input_ids=rows, attention_mask=seen, use_cache=False).logits[:, :-1] / temperature
        return taken(torch.log_softmax(z, -1), rows[:, 1:])

    found = oracle(logps)
    exact, stack = found.exact[LOGPS], found.replicas(IEEE_FP32, REPLICAS)[LOGPS]
    rms = (stack - exact).square().mean(0).sqrt()
    apart = 2 * ROW * torch.maximum(rms, U * exact.abs())
    kl = apart.square() / 2 * apart.exp() + 4 * U
    return Truth(exact, stack, apart, kl, completion[:, 1:].bool())
