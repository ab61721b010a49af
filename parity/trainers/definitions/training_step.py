"""A training step by its definition: the model in float64, the family's loss on its logits, and replicas of the step.

A trainer's gradients are compared with it. Where transformers' code casts to float32 (normalisation, softmax, rotary
angles), `Double` keeps float64.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, _pop_mode_temporarily
from torch.utils._python_dispatch import _disable_current_modes

from parity.errors import OracleError
from parity.judging.gates import Judgement, Unit, judge
from parity.judging.settle import CERTAIN, settle
from parity.recipe import IEEE_FP32
from parity.rounding.monte_carlo import MonteCarlo

aten = torch.ops.aten

FARTHEST = 0.05
"""Share of the norm of all gradients by which a replica in float32 may differ from them."""

Gradients = dict[str, Tensor]
Loss = Callable[[Any], Tensor]
"""Model -> loss of one optimizer window, 0-dim, differentiable."""


class Double(TorchFunctionMode):
    """Within it a cast to float32 of a model's code goes to float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            return args[0].double()
        kwargs = {k: torch.float64 if v is torch.float32 else v for k, v in (kwargs or {}).items()}
        return func(*(torch.float64 if a is torch.float32 else a for a in args), **kwargs)


@contextlib.contextmanager
def outside() -> Iterator[None]:
    """Without the modes in force: what is built once must not remember in which of them it was asked for first."""
    with contextlib.ExitStack() as stack:
        for _ in range(torch._C._len_torch_function_stack()):
            stack.enter_context(_pop_mode_temporarily())
        stack.enter_context(_disable_current_modes())
        yield


class StepRounding(MonteCarlo):
    """`MonteCarlo` with the operations that a whole model has besides those of a loss.

    A softmax's backward rounds y·(g - Σ g·y) as its terms, an affine product as a product, the gradient of an embedding
    as a sum over the positions of a token, and the derivative of an activation as the sum of terms that it is: u of what
    is added, not of the result, which may be smaller by cancellation.
    """

    def casts(self) -> Double:
        """What makes the model's casts to float32 casts to float64, for the time of a replica."""
        return Double()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.quiet:
            return func(*args, **(kwargs or {}))
        if func is aten.addmm.default:
            out = func(*args, **(kwargs or {}))
            alpha, beta = ((kwargs or {}).get(name, 1) for name in ("alpha", "beta"))
            return self.rounded(self.product(out, args[1] * alpha, args[2], args[0] * beta))
        if func is aten._softmax_backward_data.default:
            out = func(*args, **(kwargs or {}))
            terms = args[1] * (args[0].abs() + (args[0] * args[1]).abs().sum(args[2], keepdim=True))
            return self.scattered(out, terms.mul_(2 * self.u))
        if func is aten.embedding_dense_backward.default:
            out = func(*args, **(kwargs or {}))
            return self.scattered(out, func(args[0].abs(), *args[1:]).mul_(2 * self.u))
        if func in (aten.silu_backward.default, aten.gelu_backward.default):
            out = func(*args, **(kwargs or {}))
            return self.scattered(out, args[0].abs().mul(2 * self.u))
        return super().__torch_dispatch__(func, types, args, kwargs)


class AutocastRounding(StepRounding):
    """`StepRounding` under autocast to bfloat16: matrix products read and write it, everything else is float32."""

    def product(self, out: Tensor, a: Tensor, b: Tensor, beside: Tensor | None = None) -> Tensor:
        return self.store(super().product(out, self.store(a, "bf16"), self.store(b, "bf16"), beside), "bf16")


def logits(model: Any, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
    """Logits (T_i, V) of each sequence, one call: padded on the right, where a causal model cannot see it."""
    width = max(len(ids) for ids in sequences)
    rows = torch.tensor([[*ids, *[0] * (width - len(ids))] for ids in sequences])
    mask = torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids in sequences])
    found = model(input_ids=rows, attention_mask=mask, use_cache=False).logits
    return [found[i, : len(ids)] for i, ids in enumerate(sequences)]


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
        self._model, self._loss, self._rounding = model, loss, rounding
        self.loss, self.exact = self._run(None)
        self._replicas: list[Gradients] = []
        self._losses: list[Tensor] = []

    def _run(self, mode: StepRounding | None) -> tuple[Tensor, Gradients]:
        named = {n: p for n, p in self._model.named_parameters() if p.requires_grad}
        with Double() if mode is None else mode.casts():
            if mode is None:
                loss = self._loss(self._model)
                found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
            else:
                with mode:
                    loss = self._loss(self._model)
                    mode.backward = True
                    found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
        grads = (torch.zeros_like(p) if g is None else g for p, g in zip(named.values(), found, strict=True))
        return loss.detach(), dict(zip(named, grads, strict=True))

    def replicas(self, count: int) -> None:
        """Makes sure that there are `count` replicas.

        Raises:
            OracleError: for one that is not finite, naming the parameter: entries where a replica overflows are not
                judged, and a step of nothing else would pass whatever it is given; in float32 for one whose gradients are
                `FARTHEST` from the exact ones: that is another step, not its rounding.
        """
        while len(self._replicas) < count:
            loss, grads = self._run(self._rounding(IEEE_FP32, "fp32", 7919 * (1 + len(self._replicas))))
            lost = [n for n, g in grads.items() if bool((self.exact[n].isfinite() & ~g.isfinite()).any())]
            if lost:
                raise OracleError(f"the replica's gradient of {lost[0]} is not finite where the exact one is")
            if self._rounding is StepRounding:
                apart = float(_total({n: g - self.exact[n] for n, g in grads.items()}) / _total(self.exact))
                if apart > FARTHEST:
                    raise OracleError(
                        f"a replica's gradients are {apart:.2g} from the exact ones: no rounding does that"
                    )
            self._losses.append(loss)
            self._replicas.append(grads)

    def unit(self, name: str, count: int) -> Unit:
        """What the gradient of a parameter is measured with."""
        return Unit(self.exact[name], torch.stack([r[name] for r in self._replicas[:count]]))

    def judge(self, found: Mapping[str, Tensor | None]) -> dict[str, Judgement]:
        """The gates on every parameter's gradient, settled together."""
        judgements = settle(lambda count: self._all(found, count), certain=CERTAIN, together=True)
        return dict(judgements)

    def _all(self, found: Mapping[str, Tensor | None], count: int) -> dict[str, Judgement]:
        self.replicas(count)
        return {name: self._judge(name, found.get(name), count) for name in self.exact}

    def _judge(self, name: str, value: Tensor | None, count: int) -> Judgement:
        if value is None and not bool(self.exact[name].any()):
            value = torch.zeros_like(self.exact[name], dtype=torch.float32)
        return judge(value, self.unit(name, count), torch.float32 if value is None else value.dtype)

    def judge_loss(self, value: float) -> Judgement:
        """The scalar gate on the loss of the window."""

        def judge_with(count: int) -> dict[str, Judgement]:
            self.replicas(count)
            return {"loss": judge_scalar(value, self.loss, self._losses[:count])}

        return settle(judge_with, certain=CERTAIN)["loss"]


def judge_scalar(value: float, exact: Tensor, replicas: Sequence[Tensor]) -> Judgement:
    """The scalar gate on a number that a trainer returns in float32."""
    unit = Unit(exact, torch.stack(list(replicas)), scalar=True)
    return judge(torch.tensor(value, dtype=torch.float32), unit, torch.float32)


class Scalars:
    """Numbers of a model by their definition, and as many replicas of them as a judgement needs; without gradients.

    `model` as of `ExactStep`; `define`: model -> name -> 0-dim tensor.

    Attributes:
        exact: name -> value, float64.
    """

    def __init__(self, model: Any, define: Callable[[Any], Mapping[str, Tensor]]):
        self._model, self._define = model, define
        self.exact = self._run(None)
        self._replicas: list[Mapping[str, Tensor]] = []

    def _run(self, mode: StepRounding | None) -> Mapping[str, Tensor]:
        casts = Double() if mode is None else mode.casts()
        with torch.no_grad(), casts, mode or contextlib.nullcontext():
            return self._define(self._model)

    def judge(self, name: str, value: float) -> Judgement:
        """The scalar gate on one of them."""

        def judge_with(count: int) -> dict[str, Judgement]:
            while len(self._replicas) < count:
                self._replicas.append(self._run(StepRounding(IEEE_FP32, "fp32", 7919 * (1 + len(self._replicas)))))
            return {name: judge_scalar(value, self.exact[name], [r[name] for r in self._replicas[:count]])}

        return settle(judge_with, certain=CERTAIN)[name]
