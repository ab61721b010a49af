"""A training step by its definition: the model in float64, the family's loss on its logits, and replicas of the step.

A trainer's gradients are compared with it. Where transformers' code casts to float32 (normalisation, softmax, rotary
angles), `Double` keeps float64.
"""

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from parity.errors import OracleError
from parity.judge.escalation import CONFIRMATION
from parity.judge.operations import AnyOperation
from parity.judge.oracle import Oracle, gradient_name
from parity.judge.problem import Problem
from parity.judge.recipe import Recipe

FARTHEST = 0.05
"""Share of the norm of all gradients by which a replica in float32 may differ from them."""
LOSS = "loss"

Loss = Callable[[Any], Tensor]
"""Model -> loss of one optimizer window, 0-dim, differentiable."""


class AutocastRounding(AnyOperation):
    """`AnyOperation` under autocast to bfloat16: matrix products read and write it, everything else is float32."""

    def product(self, out: Tensor, a: Tensor, b: Tensor, beside: Tensor | None = None) -> Tensor:
        return self.store(super().product(out, self.store(a, "bf16"), self.store(b, "bf16"), beside), "bf16")


class _Defined(torch.nn.Module):
    """A definition of a model as the forward pass of a module that holds the model."""

    def __init__(self, model: Any, define: Callable[[Any], Mapping[str, Tensor]]):
        super().__init__()
        self.model, self._define = model, define

    def forward(self) -> Mapping[str, Tensor]:
        return self._define(self.model)


def _problem(
    model: Any,
    define: Callable[[Any], Mapping[str, Tensor]],
    leaves: Collection[str] = (),
    rounding: type[AnyOperation] = AnyOperation,
) -> Oracle:
    """What a definition says of a model; where that takes one replica at a time, at most `CONFIRMATION`: minutes else."""
    defined = _Defined(model, define)
    state = {n: x for n, x in (*model.named_parameters(), *model.named_buffers()) if x.is_floating_point()}

    def definition(**state: Tensor) -> Any:
        return torch.func.functional_call(defined, {f"model.{name}": x for name, x in state.items()}, ())

    problem = Problem(definition, {}, state, tuple(leaves), given={LOSS: torch.ones(())}, rounding=rounding)

    def draw(recipe: Recipe, count: int, *more: Any) -> Mapping[str, Tensor]:
        try:
            return problem.oracle.draw(recipe, count if problem.at_once else min(count, CONFIRMATION), *more)
        except NotImplementedError as error:  # else it would read as a trainer that the version has not
            raise OracleError(str(error)) from error

    return dataclasses.replace(problem.oracle, draw=draw)


def measured(model: Any, define: Callable[[Any], Mapping[str, Tensor]], counted: Collection[str] = ()) -> Oracle:
    """Numbers and tensors of a model by their definition, forward alone; `model` as of `exact_step`.

    `define`: model -> name -> a tensor whose entries are judged one by one, or 0-dim; `counted`: those that are counts, shares,
    or made of what is exact in float32.
    """
    oracle = _problem(model, define)

    def kind(name: str, found: Mapping[str, Tensor]) -> dict[str, bool]:
        return {**oracle.kind(name, found), "counted": name in counted}

    return dataclasses.replace(oracle, kind=kind)


def exact_step(model: Any, loss: Loss, rounding: type[AnyOperation] = AnyOperation) -> Oracle:
    """One optimizer window by its definition: `LOSS`, and the gradient of each parameter (0 where the loss does not reach it).

    `model` is in float64, with written-out attention and no patches (`models.model(name, torch.float64)`). Drawing replicas
    raises OracleError for one that is not finite, naming the parameter: entries where a replica overflows are not judged,
    and a step of nothing else would pass whatever it is given; in float32 for one whose gradients are `FARTHEST` from the
    exact ones: that is another step, not its rounding.
    """
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    oracle = _problem(model, lambda model: {LOSS: loss(model)}, trained, rounding)
    slopes = {name: oracle.exact[name] for name in map(gradient_name, trained)}

    def draw(recipe: Recipe, *more: Any) -> Mapping[str, Tensor]:
        found = oracle.draw(recipe, *more)
        lost = [n for n, e in slopes.items() if bool((e.isfinite() & ~found[n].isfinite()).any())]
        if lost:
            raise OracleError(f"the replica's {lost[0]} is not finite where the exact one is")
        if rounding is AnyOperation:
            squares = sum((found[n] - e).square().flatten(1).sum(1) for n, e in slopes.items())
            apart = float(torch.as_tensor(squares).max().sqrt()) / _total(slopes)
            if apart > FARTHEST:
                raise OracleError(f"a replica's gradients are {apart:.2g} from the exact ones: no rounding does that")
        return found

    return dataclasses.replace(oracle, draw=draw)


def _total(gradients: Mapping[str, Tensor]) -> float:
    """The norm of all of them together, at least the smallest number whose square is one."""
    return max(math.sqrt(sum(float(g.square().sum()) for g in gradients.values())), 1e-150)
