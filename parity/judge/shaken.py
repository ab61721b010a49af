"""Random rounding of a model as it runs, in its own dtype and memory: what its log-probs may be off by, without an oracle."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from parity.judge.monte_carlo import rounds_nothing


class Shaken(TorchDispatchMode):
    """Multiplies each result of an operation by 1 + u·ξ, ξ uniform in ±1, u the unit roundoff of its dtype, or of `dtype`.

    A product in float32 is also off by u·|a|·|b|·ξ, the norms of its row and column: what the order of its sum makes of it,
    and with tf32 what its operands lose. Random numbers are the mode's own.
    """

    def __init__(self, seed: int, dtype: torch.dtype | None = None):
        super().__init__()
        self.seed, self.dtype, self.generators = seed, dtype, dict[torch.device, torch.Generator]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if rounds_nothing(func._opname):
            return out
        if isinstance(out, tuple) and out:  # an attention, with what its backward pass needs
            return self.shaken(out[0]), *out[1:]
        return self.shaken(out, args[-2:] if func in _PRODUCTS else ())

    def shaken(self, out: Any, factors: Sequence[Tensor] = ()) -> Any:
        """`out`, in its own dtype, off by its rounding."""
        if type(out) is not Tensor or not out.is_floating_point() or out.dtype is torch.float64:
            return out
        wide = out.float()
        shaken = wide * (1 + unit(self.dtype or out.dtype) * self.noise(wide))
        if factors and out.dtype is torch.float32:
            tf32 = out.is_cuda and torch.backends.cuda.matmul.fp32_precision == "tf32"
            a, b = (x.float().norm(dim=dim, keepdim=True) for x, dim in zip(factors, (-1, -2), strict=True))
            u = unit(self.dtype or (torch.float16 if tf32 else torch.float32))
            shaken = shaken + u * a * b * self.noise(wide) / factors[0].shape[-1] ** (0.5 * tf32)
        largest = torch.finfo(out.dtype).max
        return shaken.clamp_(-largest, largest).to(out.dtype)

    def noise(self, x: Tensor) -> Tensor:
        """Uniform in ±1."""
        if x.device not in self.generators:
            self.generators[x.device] = torch.Generator(x.device).manual_seed(self.seed)
        return torch.rand(x.shape, generator=self.generators[x.device], device=x.device).mul_(2).sub_(1)


class Rounded(Shaken):
    """Float64 that is rounded to float32 after each operation: only those results are off."""

    def shaken(self, out: Any, factors: Sequence[Tensor] = ()) -> Any:
        if type(out) is not Tensor or out.dtype is not torch.float64:
            return out
        return out * (1 + unit(torch.float32) * self.noise(out).double())  # in float32 1 + u·ξ would be 1 or 1 - u


_PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.bmm.default, torch.ops.aten.addmm.default}


def unit(dtype: torch.dtype) -> float:
    """The unit roundoff of a dtype: half the distance from 1 to the next number."""
    return torch.finfo(dtype).eps / 2
