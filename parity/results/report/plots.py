"""Error ÷ allowed of every case of a run against what cases vary in, as points of a small SVG, and errors token by token."""

import collections
import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from parity.results.report.findings import Finding, ImplementationCase, about_run, headroom
from parity.results.row import Row
from parity.results.watched import TOKENS

WIDTH, HEIGHT, EDGE = 180, 80, 6
ENOUGH = 8  # tokens that show where the errors are
_LEVELS = {sign: (n % 10, n > 9) for n, sign in enumerate(TOKENS)}
LOWEST, HIGHEST = -2.0, 3.0  # powers of ten of error ÷ allowed that a plot shows; what is outside stands at its edge


@dataclasses.dataclass(frozen=True)
class Plot:
    """One axis: its name, its ends, the points as SVG paths, and the height at which an error is just allowed."""

    name: str
    low: float
    high: float
    good: str
    bad: str
    limit: int


def _axes(row: Row) -> dict[str, Any]:
    s = row.settings
    spread = row.features.get("logit_std")
    return {"V": s.get("V"), "T": s.get("T"), "temperature": s.get("temperature", 1.0), "logit size": spread}


Place: TypeAlias = tuple[str, str, str]  # implementation, family, device


def placed(cases: Iterable[ImplementationCase]) -> dict[Place, list[ImplementationCase]]:
    """Cases by place, less those about the whole run."""
    out = collections.defaultdict[Place, list[ImplementationCase]](list)
    for case in cases:
        if not about_run(case.first):
            out[_place(case.first)].append(case)
    return out


def plots(finding: Finding, cases: Mapping[Place, Sequence[ImplementationCase]]) -> list[Plot]:
    """A plot of each axis along which the cases of a finding's implementation differ, of its root quantities."""
    found = cases.get(_place(finding.lead), ())
    judged = [[r for r in c.rows if r.judged and r.subject in finding.roots] for c in found]
    points = [(_axes(its[0]), max(map(headroom, its)), any(r.failing for r in its)) for its in judged if its]
    return [plot for name in _axes(finding.lead) if (plot := _plot(name, points))]


def _place(row: Row) -> Place:
    return row.implementation, row.family, row.device


def _plot(name: str, points: Sequence[tuple[Mapping[str, Any], float, bool]]) -> Plot | None:
    placed = [(axes[name], size, wrong) for axes, size, wrong in points]
    found = [(float(x), size, wrong) for x, size, wrong in placed if isinstance(x, int | float) and x > 0]
    low, high = min((x for x, *_ in found), default=0.0), max((x for x, *_ in found), default=0.0)
    if low == high:
        return None

    def path(wanted: bool) -> str:
        scale = (WIDTH - 2 * EDGE) / math.log(high / low)
        at = ((EDGE + math.log(x / low) * scale, size) for x, size, wrong in found if wrong == wanted)
        spots = {(2 * round(x / 2), _up(size)) for x, size in at}  # points that would cover each other are one
        return "".join(f"M{x} {y}h0" for x, y in sorted(spots))

    return Plot(name, low, high, path(False), path(True), _up(1.0))


def _up(size: float) -> int:
    """The height of a point, from the top."""
    power = min(max(math.log10(size), LOWEST), HIGHEST) if size > 0 else LOWEST
    return 2 * round((EDGE + (HIGHEST - power) / (HIGHEST - LOWEST) * (HEIGHT - 2 * EDGE)) / 2)


def strips(finding: Finding) -> list[tuple[Row, list[list[tuple[int, bool]]]]]:
    """(row, its sequences as (level 0 to 9, masked) of each token), of the smallest case with `ENOUGH` tokens or the largest."""
    sized = sorted((max(sum(map(len, r.tokens)) for r in p.rows), n, p) for n, p in enumerate(finding.parts))
    case = next((p for count, _, p in sized if count >= ENOUGH), sized[-1][2])
    return [(r, levels(r.tokens)) for r in case.rows if r.tokens]


def levels(texts: Sequence[str]) -> list[list[tuple[int, bool]]]:
    """(level 0 to 9, masked) of each token of sequences as texts of `TOKENS`."""
    return [[_LEVELS.get(sign, (9, False)) for sign in line] for line in texts]
