"""Elementwise roundings of large float64 tensors, block by block: what a chain of operations hands on stays in the cache."""

from __future__ import annotations

from collections.abc import Iterator

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
    if x.numel() <= BLOCK or x.device.type != "cpu":
        return _shaken(x, size.expand_as(x), stretch)
    out = torch.empty(x.shape, dtype=x.dtype)
    rows, sizes, given, factors = (
        x.reshape(len(x), -1),
        size.expand_as(x).reshape(len(x), -1),
        out.view(len(x), -1),
        stretch.reshape(-1, 1),
    )
    for block in _blocks(rows):
        given[block] = _shaken(rows[block], sizes[block], factors[block[0]])
    return out


def _shaken(x: Tensor, size: Tensor, stretch: Tensor) -> Tensor:
    key = torch.addcmul(size, x, stretch - 0.75).mul_(stretch)
    left = key * (2.0**53 * FINE + 1)
    left = left.sub_(left - key).neg_().add_(key)
    key.masked_fill_(key == 0, 1.0)
    return torch.addcmul(x, left.div_(key), size, value=_RMS / FINE)


def _blocks(rows: Tensor) -> Iterator[tuple[slice, slice]]:
    """Slices of a matrix of about `BLOCK` entries."""
    step = max(1, BLOCK // rows.shape[1])
    for i in range(0, len(rows), step):
        for j in range(0, rows.shape[1], BLOCK):
            yield slice(i, i + step), slice(j, j + BLOCK)


ETA = torch.finfo(torch.float32).smallest_normal
"""By so much a result is off where subnormal numbers are 0."""
ZERO, FAINT, NEARLY = 2.0**-960, 2.0**-900, 2.0**-400
"""By the first an exact zero is off: ties of zeros are undecided. Sums of such are below the second. What is below the third
stands for one; no float32 computation comes to a number as small, and the root of a zero's noise is as well."""


def on_grid(x: Tensor, dtype: str, stretch: Tensor, noise: Tensor | None = None) -> Tensor:
    """x rounded to the bits of `dtype`, subnormals to its quantum, on a grid stretched by (R, 1, …) or a 0-dim factor; and off
    by `noise` times `ETA`, an exact zero by `noise` times `ZERO`."""
    if x.numel() <= BLOCK or x.device.type != "cpu":
        rounded = _on_grid(x * stretch, dtype).div_(stretch)
        return rounded if noise is None else rounded.addcmul_(noise, _flushed(x))
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows, given, factors = x.reshape(len(x), -1), out.view(len(x), -1), stretch.reshape(-1, 1)
    beside = None if noise is None else noise.reshape(len(x), -1)
    for block in _blocks(rows):
        rounded = torch.div(_on_grid(rows[block] * factors[block[0]], dtype), factors[block[0]], out=given[block])
        if beside is not None:
            rounded.addcmul_(beside[block], _flushed(rows[block]))
    return out


def _flushed(x: Tensor) -> Tensor:
    return x.abs().ge_(NEARLY).clamp_(ZERO, ETA)


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
