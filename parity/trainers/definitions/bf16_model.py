"""Replicas of a model in bfloat16, under autocast or loaded so: which operations it computes in float32, and where it rounds.

Everything that such a model stores is rounded to bfloat16; its norms, its softmax and its rotary angles are computed in
float32 by explicit casts. The casts are what tells the two apart, forward; backward each marks its region again.
"""

from typing import Any

import torch
from torch import Tensor

from parity.judge.monte_carlo import MonteCarlo, name_of
from parity.judge.operations import PARTS, AnyOperation, Double
from parity.judge.recipe import LARGEST, Recipe


class AutocastRounding(AnyOperation):
    """`AnyOperation` under autocast to bfloat16: matrix products read and write it, everything else is float32."""

    def product(self, out: Tensor, a: Tensor, b: Tensor, beside: Tensor | None = None) -> Tensor:
        return self.store(super().product(out, self.store(a, "bf16"), self.store(b, "bf16"), beside), "bf16")


class BackboneRounding(AnyOperation):
    """`AnyOperation` for a model in bfloat16: each operation rounds its result to it, but in `wide` regions to float32.

    Products and sums accumulate in float32; a composite operation is one kernel, which computes in float32. The gradient of an
    embedding is accumulated in bfloat16.
    """

    vectorised = False

    def __init__(self, recipe: Recipe, dtype: str, *args: int):
        super().__init__(recipe, "bf16", *args)
        self.wide = False
        self.casts = Wide(self)

    def __enter__(self) -> MonteCarlo:
        self.casts.__enter__()
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self.casts.__exit__(*exception)

    def rounded(self, out: Tensor, dtype: str | None = None) -> Tensor:
        return super().rounded(out, dtype or ("fp32" if self.wide else "bf16"))

    def _grid(self, x: Tensor, dtype: str, stretch: Tensor | None = None) -> Tensor:
        """As it is beyond the dtype's range: the mask of a float64 model is the smallest float64, which has no neighbour."""
        beyond = x.abs() > LARGEST[dtype]
        return torch.where(beyond, x, super()._grid(torch.where(beyond, 0.0, x), dtype, stretch))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.quiet or self.wide:
            return super().__torch_dispatch__(func, types, args, kwargs)
        name = name_of(func)
        self.wide = name in PARTS
        try:
            out = super().__torch_dispatch__(func, types, args, kwargs)
        finally:
            self.wide = False
        if name == "embedding_dense_backward":
            out = self.scattered(out, func(args[0].square(), *args[1:]).sqrt_().mul_(2.0**-8))
        return self.rounded(out) if name in (*PARTS, "embedding_dense_backward") else out


class Wide(Double):
    """`Double` that tells a `BackboneRounding` where a cast to float32 opens a region, and where one back closes it."""

    def __init__(self, mode: BackboneRounding):
        super().__init__()
        self.mode = mode

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = (*args, *kwargs.values())
        if func is torch.Tensor.float or any(x is torch.float32 for x in given):
            if torch.is_tensor(given[0]) and given[0].is_floating_point():
                args = (_Enter.apply(args[0], self.mode), *args[1:])
            else:  # indices, and constants that are made in float32
                self.mode.wide = True
            return super().__torch_function__(func, types, args, kwargs)
        if func is torch.Tensor.type_as or (func is torch.Tensor.to and any(x is torch.float64 for x in given)):
            return _Leave.apply(args[0], self.mode)
        return super().__torch_function__(func, types, args, kwargs)


class _Enter(torch.autograd.Function):
    """The identity at a cast to float32; the gradient that leaves the region backward is stored in bfloat16."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mode: BackboneRounding) -> Tensor:
        ctx.mode, ctx.outer = mode, mode.wide
        mode.wide = True
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.mode.wide = ctx.outer
        return ctx.mode.store(grad, "bf16"), None


class _Leave(torch.autograd.Function):
    """The identity at a cast back: the value is stored in bfloat16, and backward the region is entered again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mode: BackboneRounding) -> Tensor:
        ctx.mode, ctx.inner = mode, mode.wide
        mode.wide = False
        return mode.store(x, "bf16").view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.mode.wide = ctx.inner
        return grad, None
