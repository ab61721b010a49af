"""Functions of autograd that hand on a value as it is, and round it or its gradient as a Monte Carlo mode says."""

from collections.abc import Callable
from typing import Any

import torch

from parity.judge.recipe import DTYPES


class Through(torch.autograd.Function):
    """`value` in place of x, to whose gradient comes `change` of what comes to it."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, value: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        ctx.change = change
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return ctx.change(grad), None, None


def in_front(rule: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> torch.Tensor:
    """What `rule` makes of tensors that have their replicas in front, also within `torch.vmap`; without a gradient."""
    given = [x.detach() for x in tensors]
    if torch._C._are_functorch_transforms_active():
        out: torch.Tensor = _InFront.apply(rule, *given)
        return out
    with torch.no_grad():
        return rule(*given)


class _InFront(torch.autograd.Function):
    @staticmethod
    def forward(rule: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> torch.Tensor:
        return rule(*tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        raise AssertionError("its result has no gradient")

    @staticmethod
    def vmap(info: Any, in_dims: Any, rule: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> Any:
        moved = (
            x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)
            for x, dim in zip(tensors, in_dims[1:], strict=True)
        )
        return in_front(rule, *moved), 0


class Stored(torch.autograd.Function):
    """Identity where a recipe keeps a narrower dtype: perturbs the value forward and its gradient backward."""

    @staticmethod
    def forward(x: torch.Tensor, mode: Any, forward: str | None, _: str | None, factor: float) -> torch.Tensor:
        return mode.store(x, forward, factor).view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, ctx.mode, _, ctx.dtype, ctx.factor = inputs

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        with ctx.mode.unrounded():
            stored = ctx.mode.store(grad, ctx.dtype, 1 / ctx.factor)
            if stored is not grad and ctx.factor == 1.0:  # what the dtype holds is not rounded
                stored = torch.where(grad.to(DTYPES[ctx.dtype]).to(grad) == grad, grad, stored)
        return stored, None, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: torch.Tensor, *how: Any) -> Any:
        return Stored.apply(x.movedim(in_dims[0], 0), *how), 0
