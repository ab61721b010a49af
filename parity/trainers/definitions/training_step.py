"""A training step by its definition: the model in float64, the family's loss on its logits, and replicas of the step.

A trainer's gradients are compared with it. Where transformers' code casts to float32 (normalisation, softmax, rotary
angles), `Double` keeps float64.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from parity.errors import OracleError
from parity.judge.escalation import CERTAIN, settle
from parity.judge.gates import Judgement, Unit, judge
from parity.judge.recipe import IEEE_FP32
from parity.trainers.definitions.replicated import Replicas, Results
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


def in_float32(rounding: type[StepRounding]) -> Callable[[int], StepRounding]:
    """Seed -> the arithmetic of a step in float32, as plain float32 code has it."""
    return functools.partial(rounding, IEEE_FP32, "fp32")


def _total(gradients: Mapping[str, Tensor]) -> float:
    """The norm of all of them together, at least the smallest number whose square is one."""
    return max(math.sqrt(sum(float(g.square().sum()) for g in gradients.values())), 1e-150)


class ExactStep:
    """One optimizer window by its definition: exact gradients, and as many replicas of them as were asked for.

    `model` is in float64, with written-out attention and no patches (`models.model(name, torch.float64)`).

    Attributes:
        loss: the loss, float64.
        exact: parameter -> gradient of the definition, float64 (0 where the loss does not reach it).
    """

    def __init__(self, model: Any, loss: Loss, rounding: type[StepRounding] = StepRounding):
        self._rounding = rounding
        self._replicas = Replicas(model, lambda model: {LOSS: loss(model)}, in_float32(rounding), differentiated=LOSS)
        self.exact = self._replicas.exact()
        self.loss = self.exact.pop(LOSS)

    def replicas(self, count: int) -> Results:
        """`count` replicas of the loss (`LOSS`) and of each gradient, (count, …).

        Raises:
            OracleError: for one that is not finite, naming the parameter: entries where a replica overflows are not
                judged, and a step of nothing else would pass whatever it is given; in float32 for one whose gradients are
                `FARTHEST` from the exact ones: that is another step, not its rounding.
        """
        if count <= self._replicas.made:
            return self._replicas.first(count)
        grads = self._replicas.first(count)
        lost = [n for n, e in self.exact.items() if bool((e.isfinite() & ~grads[n].isfinite()).any())]
        if lost:
            raise OracleError(f"the replica's gradient of {lost[0]} is not finite where the exact one is")
        if self._rounding is StepRounding:
            squares = sum((grads[n] - e).square().flatten(1).sum(1) for n, e in self.exact.items())
            apart = float(torch.as_tensor(squares).max().sqrt()) / _total(self.exact)
            if apart > FARTHEST:
                raise OracleError(f"a replica's gradients are {apart:.2g} from the exact ones: no rounding does that")
        return grads

    def unit(self, name: str, count: int) -> Unit:
        """What the gradient of a parameter is measured with."""
        return Unit(self.exact[name], self.replicas(count)[name])

    def judge(self, found: Mapping[str, Tensor | None]) -> dict[str, Judgement]:
        """The gates on every parameter's gradient, settled together."""
        judgements = settle(lambda count: self._all(found, count), certain=CERTAIN, together=True)
        return dict(judgements)

    def _all(self, found: Mapping[str, Tensor | None], count: int) -> dict[str, Judgement]:
        return {name: self._judge(name, found.get(name), count) for name in self.exact}

    def _judge(self, name: str, value: Tensor | None, count: int) -> Judgement:
        if value is None and not bool(self.exact[name].any()):
            value = torch.zeros_like(self.exact[name], dtype=torch.float32)
        return judge(value, self.unit(name, count), torch.float32 if value is None else value.dtype)

    def judge_loss(self, value: float) -> Judgement:
        """The scalar gate on the loss of the window."""

        def judge_with(count: int) -> dict[str, Judgement]:
            return {LOSS: judge_scalar(value, self.loss, self.replicas(count)[LOSS])}

        return settle(judge_with, certain=CERTAIN)[LOSS]


def judge_scalar(value: float, exact: Tensor, replicas: Tensor) -> Judgement:
    """The scalar gate on a number that a trainer returns in float32."""
    return judge(torch.tensor(value, dtype=torch.float32), Unit(exact, replicas, scalar=True), torch.float32)


class Scalars:
    """Numbers of a model by their definition, and as many replicas of them as a judgement needs; without gradients.

    `model` as of `ExactStep`; `define`: model -> name -> 0-dim tensor.

    Attributes:
        exact: name -> value, float64.
    """

    def __init__(self, model: Any, define: Callable[[Any], Mapping[str, Tensor]]):
        self._replicas = Replicas(model, define, in_float32(StepRounding))
        self.exact = self._replicas.exact()

    def judge(self, name: str, value: float) -> Judgement:
        """The scalar gate on one of them."""

        def judge_with(count: int) -> dict[str, Judgement]:
            return {name: judge_scalar(value, self.exact[name], self._replicas.first(count)[name])}

        return settle(judge_with, certain=CERTAIN)[name]
