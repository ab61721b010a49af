"""Where the CPU time of a run went, from the shards of its results file."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Sequence

from msgspec import UnsetType

from parity.results.header import Part

MOST = 12
"""Names of a table; the others are one line."""


@dataclasses.dataclass(frozen=True)
class Share:
    """CPU seconds of one stage, phase, implementation or family, and which share of all."""

    name: str
    seconds: float
    share: float

    @property
    def cells(self) -> tuple[str, str, str]:
        """As a row of a table."""
        return self.name, f"{self.seconds:,.1f}", f"{100 * self.share:.1f} %"


def shares(parts: Sequence[Part] | UnsetType, most: int = MOST) -> dict[str, list[Share]]:
    """{"phase": …, "stage": …, "implementation": …, "family": …}, each the largest first; empty for a file without them."""
    by: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for part in () if isinstance(parts, UnsetType) else parts:
        for kind, names in part.spent.items():
            by[kind].update(names)
        if part.spent:
            by["family"][part.name.partition(" ")[0]] += part.seconds  # type: ignore[assignment]
    return {kind: list(_largest(names, most)) for kind, names in by.items()}


def _largest(names: collections.Counter[str], most: int) -> Iterator[Share]:
    total = sum(names.values()) or 1.0
    ranked = names.most_common()
    for name, seconds in ranked[:most]:
        yield Share(name, seconds, seconds / total)
    if rest := sum(seconds for _, seconds in ranked[most:]):
        yield Share(f"{len(ranked) - most} others", rest, rest / total)


def lines(parts: Sequence[Part] | UnsetType) -> list[str]:
    """The tables as text, a line each row."""
    found = shares(parts)
    if not found:
        return ["no timings in this file: an older run, or none of its shards is done"]
    out = []
    for kind, rows in found.items():
        out += ["", f"CPU seconds by {kind}"]
        width = max(len(row.name) for row in rows)
        out += [f"  {name:{width}} {seconds:>10} {share:>8}" for name, seconds, share in (row.cells for row in rows)]
    return out
