"""A case of a trainer check in each way of use, as result rows; an exception is a verdict, a disagreement is run twice."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from parity.case.case import Case
from parity.implementations.implementation import Implementation
from parity.implementations.user import loaded
from parity.judging.compare import empty_row
from parity.judging.execute import Outcome, guarded
from parity.trainers.catalogue import family, way
from parity.trainers.check import REPORTED, Cell, Check, Result
from parity.trainers.rig import drive

Row = dict[str, Any]


def rows(
    case: Case,
    implementations: Iterable[Implementation],
    device: str = "cpu",
    announce: Callable[[Implementation], None] = lambda implementation: None,
) -> Iterator[Row]:
    """Rows of a case for each implementation of its trainer, the released one first; see `parity.judging.compare.run_case`."""
    fam = family(case.family)
    settings, found = fam.full_settings(case), fam.check(case)
    reference: dict[str, Row] = {}
    against: str | None = None
    for implementation in sorted(implementations, key=lambda i: i.role != "reference"):
        if way(implementation) not in found.ways:
            continue
        announce(implementation)
        for row in _rows(
            found, Cell(case, settings, way(implementation), device, implementation.user_class), implementation
        ):
            if implementation.role == "reference":
                reference[row["quantity"]], against = row, implementation.id
            else:
                plain = reference.get(row["quantity"], {})
                row["against"], row["value_reference"] = against, plain.get("value")
                if row["blame"] == "candidate" and plain.get("verdict") == "disagree":
                    row["blame"] = "both"
            yield row


def _rows(found: Check, cell: Cell, implementation: Implementation) -> Iterator[Row]:
    base = _base(cell, implementation)
    missing = implementation.missing()
    if cell.user_class and not found.drives:
        missing = (
            f"check {found.name} does not drive the trainer's class in this process: it cannot drive yours instead"
        )
    if missing:
        yield base | {"verdict": "unsupported", "message": missing}
        return
    outcome, results = attempt(found, cell, implementation)
    if outcome.verdict != "ran":
        yield stopped_row(cell, implementation, outcome)
        return
    again = None
    if not all(r.agrees for r in results):
        _, second = attempt(found, cell, implementation)
        again = {r.quantity: r.agrees for r in second}
    for result in results:
        flaky = again is not None and not result.agrees and again.get(result.quantity, True)
        yield base | _row(result, implementation.role, flaky)


def _base(cell: Cell, implementation: Implementation) -> Row:
    return empty_row(family(cell.case.family), cell.case, implementation.id, cell.device) | {
        "role": implementation.role,
        "recipe": "fp32",
    }


def judged_row(cell: Cell, implementation: Implementation, result: Result) -> Row:
    """The row of one judged quantity, taken as it is: not run twice."""
    return _base(cell, implementation) | _row(result, implementation.role, flaky=False)


def stopped_row(cell: Cell, implementation: Implementation, outcome: Outcome) -> Row:
    """The row of a check that did not run to its end."""
    told = {"verdict": outcome.verdict, "message": outcome.message, "blame": outcome.blame}
    return _base(cell, implementation) | told


def attempt(found: Check, cell: Cell, implementation: Implementation) -> tuple[Outcome, list[Result]]:
    """Run the check once; what it raised as an outcome. A check that measured nothing is a fault of the harness."""
    results: list[Result] = []

    def run() -> Outcome:
        user_class = drive.using(loaded(cell.user_class)) if cell.user_class else contextlib.nullcontext()
        with user_class:
            results.extend(found.run(cell))
        return Outcome("ran") if results else Outcome("unsupported", message="nothing was measured", blame="harness")

    return guarded(implementation, run), results


def _row(result: Result, role: str, flaky: bool) -> Row:
    headroom = max((math.inf if math.isnan(h) else h for h in result.gates.values()), default=0.0)
    gate = max(result.gates, key=lambda g: math.inf if math.isnan(result.gates[g]) else result.gates[g])
    agrees = result.agrees
    return {
        "quantity": result.quantity,
        "verdict": "agree" if agrees else "nondeterministic" if flaky else "disagree",
        "class": None if agrees else result.kind,
        "blame": None if agrees else "reference" if role == "reference" else "candidate",
        "gate": gate,
        "headroom": _finite(headroom),
        "gates": {k: _finite(v) for k, v in result.gates.items()},
        "value": _finite(result.value),
        "value_oracle": _finite(result.exact),
        "max_abs": _finite(result.max_abs),
        "max_rel": _finite(result.max_rel),
        "worst": [] if agrees else [dict(w) for w in result.worst],
        "message": "" if agrees and gate != REPORTED else result.message,
    }


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(value)
