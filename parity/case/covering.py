"""A part of many cases that shows all that they show."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterator, Sequence, Set
from typing import TypeVar

T = TypeVar("T")


def covering(
    cases: Sequence[T],
    shows: Callable[[T], Set[Hashable]],
    met: Set[Hashable] = frozenset(),
    price: Callable[[T], float] = lambda case: 1.0,
) -> Iterator[T]:
    """Those of the cases that show what neither `met` nor any before them does, the one that shows most of it for its price
    first (the greedy set cover)."""
    shown, seen, prices = [shows(case) for case in cases], set(met), [price(case) for case in cases]
    promised = [(-len(found - seen) / prices[number], number) for number, found in enumerate(shown)]
    heapq.heapify(promised)
    while promised:
        least, number = heapq.heappop(promised)
        new = len(shown[number] - seen) / prices[number]
        if new < -least:  # what it promised was met since
            heapq.heappush(promised, (-new, number))
        elif new:
            seen |= shown[number]
            yield cases[number]
