"""Advantages of sampled completions by their rewards: GRPO's mean of a group, RLOO's of the others."""

import dataclasses
from typing import Any

import torch
from torch import Tensor

EPSILON = 1e-4
"""What TRL adds to a standard deviation."""


@dataclasses.dataclass(frozen=True)
class Baseline:
    """How rewards become advantages. `scale`: by whose standard deviation they are divided, "group", "batch" or "none".
    `late`: each function's rewards by itself in its group, and their weighted sum in the batch (GDPO, arXiv 2601.05242).
    `others`: the reward less the mean of the group's others (RLOO, arXiv 2402.14740), over the spread of all where
    `normalize`. `less`: of how many entries n a variance is divided by n - less."""

    group: int  # completions of a prompt
    scale: str = "group"
    late: bool = False
    others: bool = False
    normalize: bool = False
    less: int = 1

    def of(self, rewards: Tensor, by: Tensor, weights: Tensor) -> Tensor:
        """(N,) of rewards (N, F), weighted by (F,), where `by` (N, F) says that the function scores the completion; 0 for a
        completion without a reward, and for one alone in its group."""
        seen = by.any(1).view(-1, self.group) & (self.group > 1)
        x = torch.where(by, rewards * weights, 0.0).sum(1).view(seen.shape)
        if self.others:
            found = self._of_others(x, seen)
        elif self.late:
            own, there = rewards.view(*seen.shape, -1), by.view(*seen.shape, -1)
            each = (own - mean(own, there, 1)) / self._spread(own, there, 1)
            whole = torch.where(there, each * weights, 0.0).sum(-1)
            found = (whole - mean(whole, seen, (0, 1))) / self._spread(whole, seen, (0, 1))
        else:
            found = x - mean(x, seen, 1)
            if self.scale != "none":
                found = found / self._spread(x, seen, 1 if self.scale == "group" else (0, 1))
        return torch.where(seen, found, 0.0).flatten()

    def _spread(self, x: Tensor, seen: Tensor, dim: int | tuple[int, ...]) -> Tensor:
        """Standard deviation of what is seen, 0 of a single value, + 1e-4. It has the algebra of the trainers' code: the mean
        of squares times n/(n - 1), then its root."""
        n = seen.sum(dim, keepdim=True)
        correction = torch.where(n > self.less, n / (n - self.less).clamp(min=1), 0.0)
        return (mean((x - mean(x, seen, dim)) ** 2, seen, dim) * correction).sqrt() + EPSILON

    def _of_others(self, x: Tensor, seen: Tensor) -> Tensor:
        """The reward less the mean of the group's others; 0 where there are none."""
        x = torch.where(seen, x, 0.0)
        others = seen.sum(1, keepdim=True) - 1
        away = x - (x.sum(1, keepdim=True) - x) / others.clamp(min=1)
        counted = seen & (others > 0)
        if self.normalize:
            away = (away - mean(away, counted, (0, 1))) / self._spread(away, counted, (0, 1))
        return torch.where(counted, away, 0.0)


def mean(x: Tensor, kept: Tensor, dim: int | tuple[int, ...] | None = None) -> Tensor:
    """Of the entries that are kept, 0 of none: of all, or over `dim`, which stays with one entry."""
    over: dict[str, Any] = {"dim": dim, "keepdim": dim is not None}
    return torch.where(kept, x, 0.0).sum(**over) / kept.sum(**over).clamp(min=1)
