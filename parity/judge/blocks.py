"""Elementwise roundings of large float64 tensors, block by block: what a chain of operations hands on stays in the cache."""

from collections.abc import Callable

import torch
from torch import Tensor

from parity.judge.recipe import DTYPES, HALF_SUBNORMAL, UNIT_ROUNDOFF

BLOCK = 1 << 15
"""Entries: three buffers of 256 KiB, which the second-level cache of a core holds."""


FINE = 2.0**-36
"""Values that differ by a smaller share are the same to `shaken`: a float64 sum in another order is."""
_RMS = 0.735**-1
"""Makes the root mean square of `shaken`'s ξ that of uniform noise in ±1."""


def shaken(x: Tensor, size: Tensor, stretch: Tensor) -> Tensor:
    """x + size·ξ with size ≥ 0; ξ in ±1.4, of the mean square of uniform noise in ±1, a function of x, size and stretch.

    ξ is what rounding (x + size)·stretch to 36 bits would leave, as a share of the most that it can leave.
    """
    return _by_blocks(_shaken, x, stretch, size.expand_as(x))


def _by_blocks(rounding: Callable[..., Tensor], x: Tensor, stretch: Tensor, *beside: Tensor) -> Tensor:
    """`rounding(x, stretch, *beside)`, with tensors of the shape of x beside it; on a CPU about `BLOCK` entries at a time."""
    if x.numel() <= BLOCK or x.device.type != "cpu":
        return rounding(x, stretch, *beside)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    given, rows, *others = (t.reshape(len(x), -1) for t in (out, x, *beside))
    factors, step = stretch.reshape(-1, 1), max(1, BLOCK // rows.shape[1])
    for i in range(0, len(rows), step):
        for j in range(0, rows.shape[1], BLOCK):
            block = slice(i, i + step), slice(j, j + BLOCK)
            given[block] = rounding(rows[block], factors[block[0]], *(t[block] for t in others))
    return out


def _shaken(x: Tensor, stretch: Tensor, size: Tensor) -> Tensor:
    key = torch.addcmul(size, x, stretch - 0.75).mul_(stretch)
    left = key * (2.0**53 * FINE + 1)
    left = left.sub_(left - key).neg_().add_(key)
    key.masked_fill_(key == 0, 1.0)
    return torch.addcmul(x, left.div_(key), size, value=_RMS / FINE)


ETA = torch.finfo(torch.float32).smallest_normal
"""By so much a result is off where subnormal numbers are 0."""
ZERO, FAINT, NEARLY = 2.0**-960, 2.0**-900, 2.0**-400
"""By the first an exact zero is off: ties of zeros are undecided. Sums of such are below the second. What is below the third
stands for one; no float32 computation comes to a number as small, and the root of a zero's noise is as well."""


def on_grid(x: Tensor, dtype: str, stretch: Tensor, noise: Tensor | None = None) -> Tensor:
    """x rounded to the bits of `dtype`, subnormals to its quantum, on a grid stretched by (R, 1, …) or a 0-dim factor; and off
    by `noise` times `ETA`, an exact zero by `noise` times `ZERO`."""

    def rounding(x: Tensor, stretch: Tensor, noise: Tensor | None = None) -> Tensor:
        out = _on_grid(x * stretch, dtype).div_(stretch)
        return out if noise is None else out.addcmul_(noise, x.abs().ge_(NEARLY).clamp_(ZERO, ETA))

    return _by_blocks(rounding, x, stretch, *(() if noise is None else (noise,)))


def _on_grid(scaled: Tensor, dtype: str) -> Tensor:
    carry = scaled * (UNIT_ROUNDOFF[dtype] * 2.0**53 + 1)  # Veltkamp's splitting: the leading bits
    carry.sub_(carry - scaled)
    if dtype == "fp32":  # its smallest numbers are 0 on some devices: an error of that size is added where it matters
        return carry
    subnormal = scaled.abs() < torch.finfo(DTYPES[dtype]).smallest_normal
    if not bool(subnormal.any()):
        return carry
    quantum = 2 * HALF_SUBNORMAL[dtype]
    return torch.where(subnormal, scaled.div_(quantum).round_().mul_(quantum), carry)
