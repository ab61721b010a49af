"""The arithmetic of replicas of a whole model: the operations that a loss has not."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import _pop_mode_temporarily
from torch.utils._python_dispatch import _disable_current_modes

from parity.judge.monte_carlo import MonteCarlo

aten = torch.ops.aten


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

    stages = False

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
