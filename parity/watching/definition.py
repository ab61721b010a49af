"""What the loss makes of log-probs, held against its definition: the gradient that reaches each log-prob, and its value.

A loss of advantages that cancel is 0 whatever its normaliser; the gradients of its log-probs are not.
"""

from typing import Any

import torch
from torch import Tensor

from parity.judge.shaken import unit
from parity.trainers.definitions.micro_batch import Define, Loss, accumulation

OPERATIONS = 64
"""Roundings of the log-probs' dtype, at their full size, that a gradient may be off by."""
DRAWS = 4
"""Shaken evaluations of a definition."""


def slopes(of: Define, logps: Tensor) -> tuple[Tensor, Tensor]:
    """The loss, 0-dim, and ∂loss/∂log-prob, (B, T), of log-probs float64."""
    lp = logps.clone().requires_grad_()
    with torch.enable_grad():
        loss = of(lp)
        (found,) = torch.autograd.grad(loss, lp)
    return loss.detach(), found


def faults(trainer: Any, loss: Loss, logps: Tensor, found: Tensor, value: float | None) -> tuple[str, list[str]] | None:
    """Where the gradients `found` (B, T) of the log-probs, or the loss, are not the definition's: which, and what they are, if
    that is known. Allowed is what rounding of log-probs, `OPERATIONS` times their unit, makes of them."""
    lp, u = logps.double().cpu(), OPERATIONS * unit(logps.dtype)
    exact, slope = slopes(loss.of, lp)
    random = torch.Generator().manual_seed(0)
    signs = torch.randint(0, 2, (DRAWS, *lp.shape), generator=random).double() * 2 - 1
    near = [slopes(loss.of, lp + u * (1 + lp.abs()) * sign) for sign in signs]
    bound = torch.stack([(x - slope).abs() for _, x in near]).amax(0) + u * slope.abs() + 1e-30
    if bool(((found - slope).abs() > bound).any()):
        return f"gradients of the log-probs are not those of {loss.name}", _named(
            trainer, loss, lp, found, slope, bound
        )
    allowed = max(float((x - exact).abs()) for x, _ in near) + u * float(exact.abs() + slope.abs().sum())
    if value is None or not loss.valued or abs(value - float(exact)) <= allowed:
        return None
    times = f"{value / float(exact):.4g} times" if float(exact) else "not"
    return f"the loss that is logged is {value:.6g}", [
        f"{times} its definition's, {float(exact):.6g}; gradients are right"
    ]


def _named(trainer: Any, loss: Loss, lp: Tensor, found: Tensor, slope: Tensor, bound: Tensor) -> list[str]:
    tried = {cause: slopes(of, lp)[1] for cause, of in loss.without.items()}
    if loss.padded is not None:
        tried["padding is counted in the normaliser"] = slope * loss.padded
    args = trainer.args
    counts = {
        "micro-batches of an optimizer step": accumulation(trainer),
        "ranks": trainer.accelerator.num_processes,
        "micro-batches of a generation batch": getattr(args, "steps_per_generation", None) or 1,
    }
    for name, n in counts.items():
        tried |= {
            f"{n} times too large: not divided by the {name}": slope * n,
            f"{n} times too small: divided by the {name} once too often": slope / n,
        }
    named = []
    for name, other in tried.items():
        wide = bound * max(1.0, float(other.norm() / slope.norm().clamp(min=1e-30)))
        if bool(((found - other).abs() <= wide).all()) and not bool(((other - slope).abs() <= 4 * wide).all()):
            named.append(name)
    return named
