"""Who is to blame on a case, and what does not fail twice: one rule for losses and for trainers."""

import dataclasses
from collections.abc import Callable, Collection, Mapping

from parity.results.row import DECIDED, STOPPED, Row


def flaky(failing: Collection[str], again: Callable[[], Mapping[str, bool]]) -> set[str]:
    """Those of the failing quantities that do not fail a second time.

    `again` makes the same call once more, and says of each quantity whether it agreed; it is not called where none fails.
    """
    second = again() if failing else {}
    return {name for name in failing if second.get(name, True)}


@dataclasses.dataclass
class Blame:
    """Who is wrong on one case: its rows go through `decide` one after another, those of the reference first.

    A candidate is compared with the reference where that was judged: both are to blame where both disagree with the oracle.
    A call that came to no end is the fault of a candidate where a reference came to its end on the case, else nobody's.
    A quantity that follows another definition (`variant`) is nobody's fault.
    """

    against: str | None = None
    reference: dict[str | None, Row] = dataclasses.field(default_factory=dict)

    def decide(self, row: Row) -> Row:
        """Sets `blame`, `against` and `value_reference` of a row, and returns it."""
        wrong = row.judged and row.verdict != "agree"
        if row.role == "reference":
            if wrong or row.verdict in STOPPED:
                row.blame = row.blame or "reference"
            if row.verdict in DECIDED:
                self.reference[row.quantity], self.against = row, row.implementation
            return row
        beside = self.reference.get(row.quantity)
        row.against, row.value_reference = self.against, beside.value if beside else None
        if row.verdict in STOPPED and self.against:  # the case can be run
            row.blame = row.blame or "candidate"
        if wrong and row.variant is None:
            row.blame = "both" if beside and beside.verdict == "disagree" else "candidate"
        return row
