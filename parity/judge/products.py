"""Matrix products as hardware takes them: operands cut to tf32's ten bits, 16-bit sums split along K; and probes for both.

What a device does is found by probes when a run starts (`products`), not read from a data sheet: tensor cores are handed
float32 operands truncated on some paths and rounded on others (NVIDIA's PTX manual, `mma` with `.tf32`).
"""

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from parity.judge.recipe import TF32, TF32_TRUNCATED

BITS = 11
"""Significant bits that tf32 keeps, the leading one included."""
SPLIT_FROM = 1024
"""Length of a sum from which a product may be split along it; cuBLAS does so where the result is small beside it."""

aten = torch.ops.aten
_OPERANDS = {
    aten.mm.default: (0, 1),
    aten.bmm.default: (0, 1),
    aten.addmm.default: (1, 2),
    aten.baddbmm.default: (1, 2),
    aten.mm.out: (0, 1),
    aten.addmm.out: (1, 2),
    aten.addmm_.default: (1, 2),
}


def cut(x: torch.Tensor, precision: str, stretch: torch.Tensor | float = 1.0) -> torch.Tensor:
    """x on tf32's grid: truncated, or rounded to nearest; a grid stretched by `stretch` errs as another number would."""
    mantissa, exponent = torch.frexp(x * stretch)
    steps = mantissa * 2.0**BITS
    kept = steps.trunc() if precision == TF32_TRUNCATED else steps.round()
    return torch.where(torch.isfinite(x), torch.ldexp(kept, exponent - BITS) / stretch, x)


class CutOperands(TorchDispatchMode):
    """Every product of float32 or float64 operands, forward and backward, with its operands cut as `precision` says."""

    def __init__(self, precision: str):
        super().__init__()
        self.precision = precision

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _OPERANDS:
            args = list(args)
            for i in _OPERANDS[func]:
                if args[i].dtype in (torch.float32, torch.float64):
                    args[i] = cut(args[i], self.precision)
        return func(*args, **(kwargs or {}))


def split(a: torch.Tensor, b: torch.Tensor, pieces: int) -> Iterator[torch.Tensor]:
    """The partial products of a·b, K in `pieces` parts."""
    matmul = torch.bmm if a.dim() == 3 else torch.mm
    for left, right in zip(a.chunk(pieces, -1), b.chunk(pieces, -2), strict=True):
        yield matmul(left, right)


@dataclasses.dataclass(frozen=True)
class Products:
    """What the probes of a device found."""

    # how float32 is multiplied where tf32 is allowed: "tf32" (rounded), "tf32-truncated", or "ieee" (not at all)
    tf32: str = "ieee"
    # the 16-bit dtypes whose partial sums are rounded to 16 bits where a product is split along K
    reduced: frozenset[str] = frozenset()
    # what the probes returned, by name, for the header of a run
    values: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def described(self) -> dict[str, Any]:
        """As the header of a run records it."""
        return {"tf32": self.tf32, "reduced": sorted(self.reduced), **self.values}


PROBE = 1 + 2.0**-11 + 2.0**-12
"""Rounds up to 1 + 2⁻¹⁰ on tf32's grid and is cut to 1."""


@functools.cache
def products(device: str) -> Products:
    """The probes of a device, run once; the CPU has neither."""
    if device == "cpu":
        return Products()
    probed = torch.full((256, 256), PROBE, dtype=torch.float32, device=device)
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"  # `allow_tf32` raises where somebody has set this
    try:
        one = float((probed @ torch.eye(256, dtype=torch.float32, device=device)).cpu()[0, 0])
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    sums = {name: _split_sum(dtype, device) for name, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16))}
    tf32 = {1 + 2.0**-10: TF32, 1.0: TF32_TRUNCATED}.get(one, "ieee")
    values = {"tf32 of 1 + 2^-11 + 2^-12": one} | {f"split-K sum in {n}, exactly 1": v for n, v in sums.items()}
    return Products(tf32, frozenset(n for n, value in sums.items() if value != 1.0), values)


def _split_sum(dtype: torch.dtype, device: str, k: int = 8192) -> float:
    """257 - 256 as a long sum whose partial sums take one bit more than bfloat16 has: 1 unless they are stored in 16 bits.

    For float16 the same with 2049 - 2048; every part of each half sums to a fraction of it with the same bits.
    """
    group = 16 if dtype is torch.bfloat16 else 2
    whole = 256.0 if dtype is torch.bfloat16 else 2048.0
    step = whole / (k // 2)
    row = torch.full((k,), step, dtype=torch.float64)
    row[: k // 2 : group] += step * group / whole
    row[k // 2 :] = -step
    a = row.to(dtype).expand(16, k).to(device)
    return float((a @ torch.ones(k, 16, dtype=dtype, device=device)).float().cpu()[0, 0])
