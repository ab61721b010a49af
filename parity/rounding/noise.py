"""Uniform noise for replicas, reproducible and cheap."""

from __future__ import annotations

import random

import torch


class Noise:
    """Uniform noise in ±1, read at random offsets from one pool drawn per process (drawing it anew dominates the run)."""

    _pool: torch.Tensor | None = None
    _there: dict[torch.device, torch.Tensor] = {}
    """Copies of the pool on other devices."""
    SIZE = 1 << 22

    def __init__(self, seed: int):
        self._random = random.Random(seed)
        if Noise._pool is None:
            generator = torch.Generator().manual_seed(20261120)
            Noise._pool = torch.rand(self.SIZE, generator=generator, dtype=torch.float64) * 2 - 1

    def choice(self, values: tuple[int, ...]) -> int:
        return self._random.choice(values)

    def like(self, x: torch.Tensor) -> torch.Tensor:
        assert Noise._pool is not None
        pool = Noise._pool if x.device.type == "cpu" else self._there.get(x.device)
        if pool is None:
            pool = self._there[x.device] = Noise._pool.to(x.device)
        n = x.numel()
        if n <= self.SIZE // 2:
            start = self._random.randrange(self.SIZE - n)
            out = pool[start : start + n]
        else:  # tile the pool, each copy rolled by a random offset
            pieces, left = [], n
            while left > 0:
                start = self._random.randrange(self.SIZE // 2)
                pieces.append(pool[start : start + min(left, self.SIZE // 2)])
                left -= self.SIZE // 2
            out = torch.cat(pieces)
        return out.view(x.shape)
