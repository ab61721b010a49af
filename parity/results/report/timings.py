"""Where the CPU time of a run went, from the shards of its results file."""

import collections
from collections.abc import Sequence

from msgspec import UnsetType

from parity.results.header import Part

MOST = 12
"""Names of a table; the others are one line."""


def lines(parts: Sequence[Part] | UnsetType) -> list[str]:
    """CPU seconds by stage, phase, implementation and family, a line each, the largest first; of a file that has them."""
    by: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for part in () if isinstance(parts, UnsetType) else parts:
        for kind, names in part.spent.items():
            by[kind].update(names)
        if part.spent:
            by["family"][part.name.partition(" ")[0]] += part.seconds  # type: ignore[assignment]
    out = [] if by else ["no timings in this file: an older run, or none of its shards is done"]
    for kind, counted in by.items():
        ranked, total = counted.most_common(), counted.total() or 1.0
        if len(ranked) > MOST:
            ranked = [*ranked[:MOST], (f"{len(ranked) - MOST} others", sum(seconds for _, seconds in ranked[MOST:]))]
        width = max(len(name) for name, _ in ranked)
        out += ["", f"CPU seconds by {kind}"]
        out += [f"  {name:{width}} {seconds:>10,.1f} {100 * seconds / total:>6.1f} %" for name, seconds in ranked]
    return out
