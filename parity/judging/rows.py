"""Rows of losses and of trainer checks: the empty row, a second call after a failure, and who is to blame."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from parity.case.case import Case
from parity.case.family import AnyFamily
from parity.process import elsewhere
from parity.results.row import DECIDED, STOPPED, Row


def empty_row(family: AnyFamily, case: Case, implementation: str, device: str, **fields: Any) -> Row:
    """A row of the results contract in which nothing was judged: unsupported, unless `fields` say otherwise."""
    s = family.full_settings(case)
    shapes = {k: getattr(s, k) for k in family.shapes if hasattr(s, k)}
    replayed = str(Path(case.tensors).with_suffix(".json")) if case.tensors else case.id
    base: dict[str, Any] = {
        "case": case.id,
        "family": case.family,
        "implementation": implementation,
        "dtype": case.dtype,
        "device": device,
        "verdict": "unsupported",
        "seed": case.seed,
        "settings": dict(case.settings) | shapes,
        "features": dict(family.features(case)),
        "replay": replay_line(replayed, implementation),
    }
    return Row(**base | fields)


def replay_line(case: str, implementation: str) -> str:
    """The command that shows a case again, with the versions that `--with` named."""
    return f"parity replay {case} --implementation {implementation}{elsewhere()}"


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


def size(x: Any) -> float | None:
    """A scalar's value, a tensor's norm."""
    if x is None or isinstance(x, float):
        return x
    x = x.detach().double()
    return float(x) if x.dim() == 0 else float(x.norm())
