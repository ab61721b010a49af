"""Implementation-cases: all rows of one case through one implementation, with one verdict for the whole."""

import dataclasses
import math
from collections.abc import Iterable
from functools import cached_property

from parity.results.row import JUDGED, STOPPED, Row


@dataclasses.dataclass(frozen=True)
class ImplementationCase:
    """One case through one implementation on one device; `rows` has one row a quantity, in order."""

    implementation: str
    case: str
    family: str
    dtype: str
    device: str
    rows: tuple[Row, ...]

    @cached_property
    def outcome(self) -> str:
        """compared, or why nothing was: crashed, timed-out, out-of-memory, refused, unsupported."""
        found = {row.verdict for row in self.rows}
        for verdict in STOPPED:
            if verdict in found:
                return verdict
        if not found.isdisjoint(JUDGED):
            return "compared"
        return "refused" if "refused" in found else "unsupported"

    @property
    def judged(self) -> tuple[Row, ...]:
        """The rows in which something was compared with the oracle."""
        return tuple(row for row in self.rows if row.judged)

    @property
    def failing(self) -> tuple[Row, ...]:
        """The rows that need an explanation, known or new."""
        return tuple(row for row in self.rows if row.failing)

    @property
    def size(self) -> tuple[int, int, int, str]:
        """Orders cases for the reader: minimised ones first, then small shapes, then few settings."""
        row = self.rows[0]
        settings = row.settings
        volume = math.prod(v for v in (settings.get(k, 1) for k in "BTVH") if isinstance(v, int))
        return (row.minimised is not True, volume, len(settings), self.case)


def headroom(row: Row) -> float:
    """The headroom of a judged row; infinite where the row has null because the failure has no size."""
    if row.headroom is not None:
        return row.headroom
    return 0.0 if row.verdict == "agree" else math.inf


def about_run(row: Row) -> bool:
    """Whether a row is about the run as a whole (a pooled slope) and not about a case: such rows have no settings."""
    return not row.settings


def grouped(rows: Iterable[Row]) -> list[ImplementationCase]:
    """Rows by case, implementation and device. Where a case ran twice the later rows count, and count once."""
    found: dict[tuple[str, str, str, str, str], dict[str | None, Row]] = {}
    for row in rows:
        key = row.implementation, row.case, row.family, row.dtype, row.device
        found.setdefault(key, {})[row.quantity] = row
    return [ImplementationCase(*key, tuple(by_quantity.values())) for key, by_quantity in found.items()]
