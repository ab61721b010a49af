"""The kill matrix as a table for the terminal and for the docs, and as rows in a file."""

import collections
import dataclasses
import json
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from parity.results.report import measured
from parity.selftest.mutants.matrix import Fate

HEADINGS = ("family", "mutant", "mistake", "killed by", "quantity", "dtype", "cases: median", "max", "killed")


@dataclasses.dataclass(frozen=True)
class Line:
    """One mutant or control over all seeds: the commonest gate, quantity and dtype, and how many cases it took."""

    family: str
    name: str
    mistake: str
    gate: str
    quantity: str
    dtype: str
    median: float
    most: int
    killed: int
    streams: int

    @property
    def right(self) -> bool:
        """Killed on every stream, or, for a control, on none."""
        return self.killed == (self.streams if self.mistake else 0)

    def cells(self) -> tuple[str, ...]:
        """As under `HEADINGS`."""
        wrong = "" if self.right else " survives" if self.mistake else " false alarm"
        what = self.family, self.name, self.mistake or "control", self.gate, self.quantity, self.dtype
        return *what, f"{self.median:g}", str(self.most), f"{self.killed}/{self.streams}{wrong}"


def lines(fates: Iterable[Fate]) -> list[Line]:
    """One line for each mutant and control; what has the wrong fate first, then by the cases it took."""
    groups: dict[tuple[str, str], list[Fate]] = collections.defaultdict(list)
    for fate in fates:
        groups[fate.family, fate.name].append(fate)
    return sorted(
        map(_line, groups.values()), key=lambda line: (line.right, line.family, not line.mistake, -line.median)
    )


def _line(fates: Sequence[Fate]) -> Line:
    dead = [fate for fate in fates if fate.killed]
    cases = [fate.cases for fate in dead or fates]
    first, quantities = fates[0], [fate.quantity.removeprefix("relation: ") for fate in dead]
    told = _common(fate.gate for fate in dead), _common(quantities), _common(fate.dtype for fate in dead)
    median, most = statistics.median(cases), max(cases)
    return Line(first.family, first.name, first.mistake, *told, median, most, len(dead), len(fates))


def _common(values: Iterable[str]) -> str:
    """The commonest value, with "…" where there were others."""
    counted = collections.Counter(values).most_common()
    return "" if not counted else counted[0][0] + (" …" if len(counted) > 1 else "")


def show(found: Sequence[Line], console: Console) -> None:
    """Print the table and, in one line, the count."""
    table = Table(*HEADINGS)
    for line in found:
        table.add_row(*line.cells(), style=None if line.right else "red")
    console.print(table)
    console.print(summary(found), markup=False)


def summary(found: Sequence[Line]) -> str:
    """How many mutants were killed on every stream, and how many controls live."""
    mutants, controls = [line for line in found if line.mistake], [line for line in found if not line.mistake]
    return (
        f"{sum(line.right for line in mutants)} of {len(mutants)} mutants killed on every stream, "
        f"{sum(line.right for line in controls)} of {len(controls)} controls alive"
    )


def markdown(found: Sequence[Line]) -> str:
    """The table for the docs."""
    return "\n".join(measured.table(HEADINGS, ([c.replace("|", "\\|") for c in line.cells()] for line in found)))


def write(fates: Iterable[Fate], path: Path) -> None:
    """One object a line for each mutant or control and seed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        for fate in fates:
            file.write(
                json.dumps(dataclasses.asdict(fate) | {"killed": fate.killed, "right": fate.right}, allow_nan=False)
                + "\n"
            )


def read(path: Path) -> list[Fate]:
    """What `write` wrote."""
    names = {field.name for field in dataclasses.fields(Fate)}
    return [Fate(**{k: v for k, v in json.loads(row).items() if k in names}) for row in path.read_text().splitlines()]
