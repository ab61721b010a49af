"""How near implementations come to the float64 oracle, in pairs, on the cases that both were judged on.

`python -m cases.bench.accuracy reports/results.ndjson [--of fixes.selective_log_probs …] [--at-least 30]`

The error of a quantity is ‖value - oracle‖ ÷ ‖oracle‖, whatever the recipe: headroom would allow a coarse recipe more.
"""

import argparse
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cases.bench.measure import short
from parity.results.report import measured
from parity.results.report.rows import read
from parity.results.row import DECIDED, Row

OURS = ("fixes.selective_log_probs", "fixes.FusedLinearGRPOLoss")


@dataclass(frozen=True)
class Comparison:
    """Two implementations in one dtype, values or gradients: the paired errors of all that both were judged on."""

    ours: str
    peer: str
    kind: str
    dtype: str
    pairs: tuple[tuple[float, float], ...]

    @property
    def no_farther(self) -> float:
        """Share of the cases in which our error is at most the peer's."""
        return sum(a <= b for a, b in self.pairs) / len(self.pairs)


def compare(rows: Iterable[Row], ours: Sequence[str] = OURS) -> list[Comparison]:
    """Each of `ours` with every peer of its family, by dtype; counts, relations and pooled slopes left out."""
    errors: dict[tuple[str, str, str], dict[tuple[str, str], dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    for row in decided(rows):
        kind = "gradients" if row.subject.startswith("grad_") else "values"
        errors[row.family, kind, row.dtype][row.case, row.subject][row.implementation] = error(row)
    found = []
    for (_, kind, dtype), by_case in sorted(errors.items()):
        for fix in ours:
            together = [e for e in by_case.values() if fix in e]
            for peer in sorted({name for e in together for name in e if not name.startswith("fixes.")}):
                pairs = tuple((e[fix], e[peer]) for e in together if peer in e)
                found.append(Comparison(fix, peer, kind, dtype, pairs))
    return found


def decided(rows: Iterable[Row]) -> Iterable[Row]:
    """Rows that were held against the oracle as numbers: no counts, relations, pooled slopes, nor the protocol."""
    apart, held = ("relation", "pooled", "protocol"), (row for row in rows if row.verdict in DECIDED)
    return (row for row in held if "exact" not in row.gates and not row.subject.startswith(apart))


def error(row: Row) -> float:
    """‖value - oracle‖ ÷ ‖oracle‖; the distance itself where the oracle is 0, infinite where it is not finite."""
    if row.dist is None or row.value_oracle is None:
        return math.inf
    return float(row.dist) / float(row.value_oracle) if row.value_oracle else float(row.dist)


def table(found: Sequence[Comparison]) -> str:
    """Markdown, one line a comparison."""
    lines = []
    for c in sorted(found, key=lambda c: (c.ours, c.dtype, c.kind, c.peer)):
        sides = list(zip(*c.pairs, strict=True))
        sizes = [", ".join(short(of(side)) for side in sides) for of in (statistics.median, max)]
        lines.append([c.ours, c.peer, c.dtype, c.kind, f"{len(c.pairs):,}", *sizes, f"{c.no_farther:.0%}"])
    heads = ["ours", "peer", "dtype", "of", ">pairs", ">median: ours, peer", ">worst: ours, peer", ">ours no farther"]
    return "\n".join(measured.table(heads, lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("--of", nargs="+", default=list(OURS))
    parser.add_argument("--at-least", type=int, default=1, metavar="PAIRS", help="leave out peers with fewer pairs")
    options = parser.parse_args()
    rows = read(options.results)[1]
    print(measured.head("Accuracy of the fixes", "python -m cases.bench.accuracy", "accuracy.md"))
    print(table([c for c in compare(rows, options.of) if len(c.pairs) >= options.at_least]))


if __name__ == "__main__":
    main()
