"""What `--json` prints: one object, and nothing else on standard output."""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from parity.results.report.summary import Summary
from parity.results.row import Row


class FindingOut(msgspec.Struct):
    """A finding: in how many cases, in which dtypes, from which quantities it starts, and the row that speaks for it."""

    cases: int
    dtypes: list[str]
    quantities: list[str]
    row: Row


class RunOut(msgspec.Struct, kw_only=True):
    """`parity run --json`, `parity report --json`."""

    run: str
    exit_code: int
    reasons: list[str]
    incomplete: str
    compared: dict[str, int]
    new: list[FindingOut]
    known: list[FindingOut]


def text(value: Any) -> str:
    """The JSON of a structure or of a list of them, indented."""
    return msgspec.json.format(msgspec.json.encode(value), indent=1).decode()


def of_run(summary: Summary, code: int, reasons: Sequence[str]) -> RunOut:
    """A run as its reports show it."""

    def found(findings: Iterable[Any]) -> list[FindingOut]:
        return [FindingOut(f.cases, list(f.dtypes), list(f.roots), f.lead) for f in findings]

    return RunOut(
        run=summary.run,
        exit_code=code,
        reasons=list(reasons),
        incomplete=summary.incomplete,
        compared=dict(summary.compared),
        new=found(summary.findings),
        known=found(summary.known),
    )
