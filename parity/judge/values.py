"""Values by hash: each is a function of (seed, name, index), so a smaller shape keeps the rest, and no library changes them."""

import hashlib
import math
from collections.abc import Sequence

import torch

_GOLDEN, _FIRST, _SECOND = (
    int.from_bytes(x.to_bytes(8, "little"), "little", signed=True)
    for x in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)


def _shifted(h: torch.Tensor, bits: int) -> torch.Tensor:
    """h >> bits of unsigned 64-bit integers, which torch holds as signed ones."""
    return (h >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _mix(h: torch.Tensor) -> torch.Tensor:
    """The finaliser of splitmix64 (Steele, Lea and Flood 2014), in place: a bijection of 64-bit integers."""
    h.bitwise_xor_(_shifted(h, 30)).mul_(_FIRST)
    h.bitwise_xor_(_shifted(h, 27)).mul_(_SECOND)
    return h.bitwise_xor_(_shifted(h, 31))


def hashes(seed: int, name: str, shape: Sequence[int]) -> torch.Tensor:
    """int64 of `shape`, to be read as unsigned; element (i, j, …) depends on seed, name and (i, j, …) only."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    out = torch.tensor(int.from_bytes(digest, "little", signed=True), device="cpu")
    for size in shape:
        out = _mix(out[..., None] + torch.arange(1, size + 1, device="cpu") * _GOLDEN)
    return out


def uniform(seed: int, name: str, shape: Sequence[int]) -> torch.Tensor:
    """float64 in [0, 1) on the grid 2⁻²⁴."""
    return _shifted(hashes(seed, name, shape), 40).double() * 2.0**-24


def normal(seed: int, name: str, shape: Sequence[int]) -> torch.Tensor:
    """float64, bell-shaped with mean 0 and standard deviation 1.03 in ±3.6, on the grid 2⁻¹³ (a sum of four uniforms)."""
    h = hashes(seed, name, shape)
    total = h & 0x3FFF
    for field in range(1, 4):
        total += (h >> 16 * field).bitwise_and_(0x3FFF)
    return (total - 2 * 0x3FFF).double().mul_(2.0**-13 * 0.8984375)


def integers(seed: int, name: str, shape: Sequence[int], bound: int) -> torch.Tensor:
    """int64 in [0, bound). Lowering `bound` keeps every value that stays below it.

    Candidates are read from the high bits downwards with the smallest sufficient number of bits and rejected while too
    large; `bound` of the same bit length therefore share their candidates. Raises ValueError for a bound below 1.
    """
    if bound < 1:
        raise ValueError(f"integers {name!r}: bound {bound} must be at least 1")
    mask = (1 << max(1, math.ceil(math.log2(bound)))) - 1 if bound > 1 else 1
    out = torch.full(tuple(shape), -1, dtype=torch.int64, device="cpu")
    for attempt in range(12):
        if bool((out >= 0).all()):
            break
        candidate = hashes(seed, f"{name}#{attempt}", shape) & mask
        out = torch.where((out < 0) & (candidate < bound), candidate, out)
    return out.clamp(min=0)
