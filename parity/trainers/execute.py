"""A case of a trainer check as result rows. An exception is a verdict; a disagreement runs twice."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from msgspec.structs import replace

from parity.case.case import Case
from parity.compare.result_rows import Blame, empty_row, flaky, size
from parity.implementations.implementation import Implementation
from parity.judge.gates import Judgement
from parity.protocol import process_state
from parity.protocol.call import guarded
from parity.protocol.exceptions import Outcome
from parity.results.row import VALUE, Row, finite
from parity.trainers.catalogue import family, path_of
from parity.trainers.check import Check, CheckCall, Quantity
from parity.trainers.rig import drawn

Judged = tuple[Quantity, Judgement]


def rows(
    case: Case,
    implementations: Iterable[Implementation],
    device: str = "cpu",
    announce: Callable[[Implementation], None] = lambda implementation: None,
) -> Iterator[Row]:
    """Rows of a case for each implementation of its trainer, the released one first; see `parity.compare.one_case.run_case`."""
    fam = family(case.family)
    settings, found = fam.full_settings(case), fam.check(case)
    blame = Blame()
    for implementation in sorted(implementations, key=lambda i: i.role != "reference"):
        if path_of(implementation) not in found.paths:
            continue
        if process_state.broken():  # a fresh process goes on from here
            return
        announce(implementation)
        used = device if found.moves else "cpu"  # the row tells the device that was used
        call = CheckCall(case, settings, path_of(implementation), used)
        with drawn.of_case(case.seed):
            found_rows = list(_rows(found, call, implementation))
        yield from map(blame.decide, found_rows)


def _rows(found: Check, call: CheckCall, implementation: Implementation) -> Iterator[Row]:
    about = {"role": implementation.role, "recipe": "fp32"}
    base = empty_row(family(call.case.family), call.case, implementation.id, call.device, **about)
    missing = implementation.missing()
    if implementation.user_class and not found.drives:
        missing = f"check {found.name} does not drive the trainer's class in this process: it cannot drive yours"
    if missing:
        yield replace(base, message=missing)
        return
    outcome, results = attempt(call, implementation)
    if outcome.verdict != "ran":
        yield replace(base, verdict=outcome.verdict, message=outcome.message, blame=outcome.blame)
        return
    failing = [q.name for q, j in results if not j.agrees]
    unsteady = flaky(failing, lambda: {q.name: j.agrees for q, j in attempt(call, implementation)[1]})
    yield from (_row(base, q, j, q.name in unsteady) for q, j in results)


def attempt(call: CheckCall, implementation: Implementation) -> tuple[Outcome, list[Judged]]:
    """Call the implementation once; what it raised as an outcome. A check that measured nothing is a fault of the harness."""
    results: list[Judged] = []

    def run() -> Outcome:
        driven: Any = implementation.call
        results.extend((quantity, judge(quantity)) for quantity in driven(call))
        return Outcome("ran") if results else Outcome("unsupported", message="nothing was measured", blame="harness")

    return guarded(implementation, run), results


def judge(quantity: Quantity) -> Judgement:
    """Hold what a check measured against its definition."""
    j = quantity.definition.judge(quantity.value)
    message = "; ".join(filter(None, [j.message, quantity.message]))
    return j if j.agrees else dataclasses.replace(j, message=message)


def _row(base: Row, quantity: Quantity, j: Judgement, unsteady: bool) -> Row:
    return replace(
        base,
        quantity=quantity.name,
        verdict="agree" if j.agrees else "nondeterministic" if unsteady else "disagree",
        cls=None if j.agrees else "logic",
        gate=j.gate,
        headroom=finite(j.headroom),
        gates={k: finite(v) for k, v in j.gates.items()},
        value=finite(_size(quantity.value), VALUE),
        value_oracle=finite(_size(quantity.definition.exact), VALUE),
        max_abs=finite(j.max_abs),
        worst=[] if j.agrees else list(j.worst),
        message="" if j.agrees else j.message,
    )


def _size(x: Any) -> float | None:
    """A number's value, a tensor's norm, that of all tensors together."""
    return math.hypot(*(size(t) or 0.0 for t in x.values())) if isinstance(x, Mapping) else size(x)
