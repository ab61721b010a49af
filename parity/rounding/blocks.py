"""Elementwise roundings of large float64 tensors, block by block: what a chain of operations hands on stays in the cache."""

from __future__ import annotations

import torch
from torch import Tensor

from parity.case.case import DTYPES
from parity.recipe import HALF_SUBNORMAL, UNIT_ROUNDOFF

BLOCK = 1 << 15
"""Entries: three buffers of 256 KiB, which the second-level cache of a core holds."""


def perturbed(x: Tensor, noise: Tensor, u: float, eta: float) -> Tensor:
    """x + (u·|x| + η)·noise."""
    if x.numel() <= BLOCK or x.device.type != "cpu" or not x.is_contiguous():
        return torch.addcmul(x, x.abs().mul_(u).add_(eta), noise)
    out, size = torch.empty_like(x), x.new_empty(BLOCK)
    for a, n, o in zip(*(t.view(-1).split(BLOCK) for t in (x, noise, out)), strict=True):
        scale = torch.abs(a, out=size[: a.numel()]).mul_(u).add_(eta)
        torch.addcmul(a, scale, n, out=o)
    return out


def on_grid(x: Tensor, dtype: str, stretch: Tensor) -> Tensor:
    """x rounded to the bits of `dtype`, subnormals to its quantum, on a grid stretched by (R, 1, …) or a 0-dim factor."""
    if x.numel() <= BLOCK or x.device.type != "cpu":
        return _on_grid(x * stretch, dtype).div_(stretch)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows, given, factors = x.reshape(len(x), -1), out.view(len(x), -1), stretch.reshape(-1, 1)
    width = rows.shape[1]
    step = max(1, BLOCK // width)
    for i in range(0, len(x), step):
        for j in range(0, width, BLOCK):
            block, factor = (slice(i, i + step), slice(j, j + BLOCK)), factors[i : i + step]
            torch.div(_on_grid(rows[block] * factor, dtype), factor, out=given[block])
    return out


def _on_grid(scaled: Tensor, dtype: str) -> Tensor:
    carry = scaled * (UNIT_ROUNDOFF[dtype] * 2.0**53 + 1)  # Veltkamp's splitting: the leading bits
    carry.sub_(carry - scaled)
    subnormal = scaled.abs() < torch.finfo(DTYPES[dtype]).smallest_normal
    if not bool(subnormal.any()):
        return carry
    quantum = 2 * HALF_SUBNORMAL[dtype]
    return torch.where(subnormal, scaled.div_(quantum).round_().mul_(quantum), carry)
