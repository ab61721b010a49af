"""Where the CPU time of a run went, from the shards of its results file.

`python -m parity.results.report.timings reports/results.ndjson > docs/measured/timings.md` prints the page.
"""

import argparse
import collections
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

from msgspec import UnsetType

from parity.results.header import Header, Part
from parity.results.report import measured
from parity.results.report.rows import read
from parity.results.row import JUDGED, Row

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


KINDS = {"drawn": "drawn cases of the losses", "frozen": "frozen cases", "checks": "checks of trainers"}
"""Second word of a shard's name -> what is in it."""


def by_kind(parts: Sequence[Part], rows: Sequence[Row]) -> Iterator[tuple[str, int, float]]:
    """(what, comparisons, CPU seconds) of the shards of each kind; a comparison is one implementation on one case."""
    seconds: collections.Counter[str] = collections.Counter()
    for part in parts:
        seconds[part.name.split()[1]] += part.seconds  # type: ignore[assignment]
    pairs: dict[str, set[tuple[str, str, str | None]]] = collections.defaultdict(set)
    for row in rows:
        if row.verdict in JUDGED and not row.minimised and not row.case.startswith("pooled"):
            kind = "frozen" if row.frozen else "checks" if row.family.endswith("-trainer") else "drawn"
            pairs[kind].add((row.case, row.implementation, row.frozen or None))
    for kind, what in KINDS.items():
        if seconds[kind]:
            yield what, len(pairs[kind]), seconds[kind]


def page(header: Header, rows: Sequence[Row]) -> str:
    """The page behind its head."""
    parts = [] if isinstance(header.parts, UnsetType) else header.parts
    kinds = list(by_kind(parts, rows))
    about = header.header
    total = [("all", sum(n for _, n, _ in kinds), sum(s for _, _, s in kinds))]
    cells = (
        [what, f"{count:,}", f"{seconds:,.0f}", measured.short(count / seconds)]
        for what, count, seconds in (*kinds, *(total if kinds else []))
    )
    return "\n".join(
        [
            f"CPU time of the workers of `{about.command}`, revision {about.git}, profile {about.profile}, "
            f"{about.device_name}, {(about.started or '')[:10]}.",
            "",
            *measured.table(["", ">comparisons", ">CPU seconds", ">a CPU second"], cells),
            "",
            "```",
            *lines(parts)[1:],
            "```",
        ]
    )


def main() -> None:
    """Prints the page of a results file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    header, rows = read(parser.parse_args().results)
    print(measured.head("Where the time of a run goes", "python -m parity.results.report.timings", "timings.md"))
    print(page(header, rows))


if __name__ == "__main__":
    main()
