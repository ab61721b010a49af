"""What summing many terms costs, in float32, in one lane or in a few: a random walk, terms that round alike or are lost."""

from __future__ import annotations

import math

import torch

LANES = 16
"""In which a vector unit adds along the last dimension; along another one it adds in turn, in one."""
MANY = 64
"""Terms of a sum from which on equal ones are counted."""
TIE = 2.0**-12
"""Logits that differ by less count as equal: rounded in 16 bits they may be."""


def exponentials(logs: torch.Tensor, dim: int, u: float, lanes: torch.Tensor) -> torch.Tensor | float:
    """The cost of Σ exp(logs) = 1 along `dim` in so many lanes, in u: √V/4, a random walk, and m/4 a lane for m equal terms.

    Equal terms (logits that a softcap saturates, rows of the head that pad it) round the same way at every addition: a
    lane of n of them is off by up to n·u/4, by n·u if it holds larger terms already. It matters from some dozens of
    terms on, and so do those that are `_lost`.
    """
    walk = float(logs.shape[dim] ** 0.5 / 4)
    if logs.shape[dim] < MANY:
        return walk
    small = bool((logs < math.log(u)).any())
    lost = _lost(logs.exp(), 1.0, dim, u, lanes) if small else 0.0
    top = logs >= logs.amax(dim, keepdim=True) - TIE
    equal = top.sum(dim, keepdim=True) / 4 + _beside(logs, top, dim).sum(dim, keepdim=True)
    return walk + lost / u + equal / lanes


def mass_of_maxima(logs: torch.Tensor, dim: int) -> torch.Tensor:
    """Σ exp(logs) while an entry is the largest so far along `dim`, 0 where it never is; ties are all the largest.

    What an online log-sum-exp, which rescales its sum when the maximum grows, has added up with this maximum.
    """
    logs = logs.movedim(dim, -1).contiguous()
    largest = logs.cummax(-1).values
    last = torch.searchsorted(largest, logs + TIE, right=True).sub_(1).clamp_(min=0)
    mass = logs.exp().cumsum(-1).gather(-1, last)
    return torch.where(logs >= largest - TIE, mass, 0.0).movedim(-1, dim)


def terms(sizes: torch.Tensor, dim: int, u: float, lanes: torch.Tensor) -> torch.Tensor:
    """The cost of a sum of terms of these sizes along `dim`: u·√V/4 of all but the largest, equal terms, and `_lost` ones.

    Equal terms cost what they do in `exponentials`, but none costs more than itself.
    """
    total, largest = sizes.sum(dim, keepdim=True), sizes.amax(dim, keepdim=True)
    walk = u * sizes.shape[dim] ** 0.5 / 4 * (total - largest)
    top = sizes >= largest * (1 - 2.0**-12)
    rounded = torch.minimum(sizes, u * total)
    beside = _beside(sizes, top, dim)
    at_top = torch.where(top, rounded, 0.0).sum(dim, keepdim=True) / 4
    equal = torch.where(beside, rounded.narrow(dim, 1, beside.shape[dim]), 0.0).sum(dim, keepdim=True) + at_top
    return walk + equal / lanes + _lost(sizes, total, dim, u, lanes)


def _beside(x: torch.Tensor, top: torch.Tensor, dim: int) -> torch.Tensor:
    """Which of x, but for the first, equal the term before them and are not at the `top`."""
    return (x.diff(dim=dim) == 0) & ~top.narrow(dim, 1, x.shape[dim] - 1)


def _lost(sizes: torch.Tensor, total: torch.Tensor | float, dim: int, u: float, lanes: torch.Tensor) -> torch.Tensor:
    """A quarter of the terms that may be lost: below half a unit of their lane's total, which grows from 0."""
    return torch.where(sizes < total * (u / lanes), sizes, 0.0).sum(dim, keepdim=True) / 4
