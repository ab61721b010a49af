"""Noise for replicas, reproducible and cheap: uniform numbers from a pool, and a number that a value itself decides."""

import random

import torch

from parity.judge.blocks import shaken

CPU = torch.device("cpu")


class Noise:
    """Uniform noise in ±1, read at random offsets from one pool drawn per process (drawing it anew dominates the run)."""

    _pools: dict[tuple[torch.device, bool], torch.Tensor] = {}
    """On each device, and whether moved to 1 to 2."""
    SIZE = 1 << 22

    def __init__(self, seed: int, alone: bool = False):
        self._seed = seed
        self.alone = alone  # one replica, without a dimension for replicas in front
        self._random = random.Random(seed)
        self._constants: dict[float, float] = {}
        if not self._pools:
            generator = torch.Generator().manual_seed(20261120)
            self._pools[CPU, False] = (
                torch.rand(self.SIZE, generator=generator, dtype=torch.float64, device=CPU) * 2 - 1
            )

    def choice(self, values: tuple[int, ...]) -> int:
        return self._random.choice(values)

    def like(self, x: torch.Tensor) -> torch.Tensor:
        """Independent noise of the shape of x."""
        n, pool = x.numel(), self._on(x.device)
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

    def each(self, x: torch.Tensor) -> torch.Tensor:
        """One number for each replica, (R, 1, …) beside x (R, …)."""
        return self._one_each(x, self._on(x.device), self._random.random())

    def stretch(self, x: torch.Tensor) -> torch.Tensor:
        """The same in 1 to 2."""
        return self._one_each(x, self._on(x.device, stretches=True), self._random.random())

    def constant(self, c: float, x: torch.Tensor) -> torch.Tensor:
        """The same as `each` for a constant: a replica has one number for it, wherever it is used."""
        if c not in self._constants:
            self._constants[c] = random.Random(f"{self._seed} {c.hex()}").random()
        return self._one_each(x, self._on(x.device), self._constants[c])

    def shaken(self, x: torch.Tensor, size: torch.Tensor) -> torch.Tensor:
        """x + size·ξ, ξ decided by x and size in half of the replicas, the first ones, and independent in the others.

        Equal rows of a head have equal logits where one kernel computes them all, and not where chunks or the edge of a
        tile take another path. Both are correct.
        """
        if x.dim() == 0 or x.numel() == 0:
            return x + size * self.like(x)
        n = x.shape[0]
        alike = n * self.choice((0, 1)) if self.alone or n == 1 else (n + 1) // 2
        size = size.expand_as(x)
        first, others = x[:alike], x[alike:]
        if alike:
            first = shaken(first, size[:alike], self.stretch(first))
        return torch.cat([first, torch.addcmul(others, size[alike:], self.like(others))]) if alike < n else first

    def _one_each(self, x: torch.Tensor, pool: torch.Tensor, where: float) -> torch.Tensor:
        if x.dim() and x.shape[0] > self.SIZE // 2:
            pool = pool.repeat(1 + x.shape[0] // (self.SIZE // 2))
        start = int(where * (self.SIZE // 2))
        if self.alone and x.dim():
            return pool[start].expand(x.shape[0]).view(-1, *(1,) * (x.dim() - 1))
        return pool[start : start + x.shape[0]].view(-1, *(1,) * (x.dim() - 1)) if x.dim() else pool[start]

    def _on(self, device: torch.device, stretches: bool = False) -> torch.Tensor:
        if (device, stretches) not in self._pools:
            pool = self._pools[CPU, False].to(device)
            self._pools[device, stretches] = 1.5 + 0.5 * pool if stretches else pool
        return self._pools[device, stretches]
