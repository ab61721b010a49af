"""A training step by its definition: the model in float64, the family's loss on its logits, and replicas of the step.

A trainer's gradients are compared with it. Where transformers' code casts to float32 (normalisation, softmax, rotary
angles), `Double` keeps float64.
"""

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from parity.errors import OracleError
from parity.judge.escalation import CONFIRMATION
from parity.judge.oracle import Oracle, gradient_name
from parity.judge.problem import Problem
from parity.judge.recipe import Recipe
from parity.trainers.definitions.step_rounding import StepRounding
from parity.trainers.rig.architectures import PAD

FARTHEST = 0.05
"""Share of the norm of all gradients by which a replica in float32 may differ from them."""
LOSS = "loss"

Loss = Callable[[Any], Tensor]
"""Model -> loss of one optimizer window, 0-dim, differentiable."""


def rows(sequences: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """`input_ids` and `attention_mask`, (N, T), of sequences padded on the right."""
    width = max(len(ids) for ids in sequences)
    return {
        "input_ids": torch.tensor([[*ids, *[PAD] * (width - len(ids))] for ids in sequences]),
        "attention_mask": torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids in sequences]),
    }


def logits(model: Any, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
    """Logits (T_i, V) of each sequence, one call: padded on the right, where a causal model cannot see it."""
    found = model(**rows(sequences), use_cache=False).logits
    return [found[i, : len(ids)] for i, ids in enumerate(sequences)]


def completion_logits(model: Any, window: Sequence[tuple[list[int], int]]) -> list[tuple[Tensor, Tensor]]:
    """Of each sequence the logits (T_i, V) that predict the tokens of its completion, and these tokens."""
    found = logits(model, [tokens for tokens, _ in window])
    return [(z[start - 1 : -1], torch.tensor(tokens[start:])) for z, (tokens, start) in zip(found, window, strict=True)]


def taken(logps: Tensor, tokens: Tensor) -> Tensor:
    """The log-probs of the tokens (…, T) out of those of the whole vocabulary (…, T, V)."""
    return logps.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def completion_logps(model: Any, window: Sequence[tuple[list[int], int]], temperature: float = 1.0) -> list[Tensor]:
    """Log-probs (T_i,) of the tokens of each completion."""
    return [taken(torch.log_softmax(z / temperature, -1), tokens) for z, tokens in completion_logits(model, window)]


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
    rounding: type[StepRounding] = StepRounding,
) -> Oracle:
    """What a definition says of a model; where that takes one replica at a time, at most `CONFIRMATION`: minutes else."""
    defined = _Defined(model, define)
    state = {n: x for n, x in (*model.named_parameters(), *model.named_buffers()) if x.is_floating_point()}

    def definition(**state: Tensor) -> Any:
        return torch.func.functional_call(defined, {f"model.{name}": x for name, x in state.items()}, ())

    problem = Problem(definition, {}, state, tuple(leaves), given={LOSS: torch.ones(())}, rounding=rounding)

    def draw(recipe: Recipe, count: int, *more: Any) -> Mapping[str, Tensor]:
        return problem.oracle.draw(recipe, count if problem.at_once else min(count, CONFIRMATION), *more)

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


def exact_step(model: Any, loss: Loss, rounding: type[StepRounding] = StepRounding) -> Oracle:
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
        if rounding is StepRounding:
            squares = sum((found[n] - e).square().flatten(1).sum(1) for n, e in slopes.items())
            apart = float(torch.as_tensor(squares).max().sqrt()) / _total(slopes)
            if apart > FARTHEST:
                raise OracleError(f"a replica's gradients are {apart:.2g} from the exact ones: no rounding does that")
        return found

    return dataclasses.replace(oracle, draw=draw)


def _total(gradients: Mapping[str, Tensor]) -> float:
    """The norm of all of them together, at least the smallest number whose square is one."""
    return max(math.sqrt(sum(float(g.square().sum()) for g in gradients.values())), 1e-150)
