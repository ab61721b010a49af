"""What `--json` prints: one object of these structures, or a list of them, and nothing else on standard output."""

from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from parity.results.report.summary import Summary
from parity.results.row import Row

Out = TypeVar("Out", bound=msgspec.Struct)


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


class ImplementationOut(msgspec.Struct, kw_only=True):
    """`parity list --json` prints a list of these."""

    id: str
    family: str
    role: str
    library: str | None
    version: str | None
    missing: str | None
    opt_in: bool
    interpreted: bool
    contexts: list[str]


class SettingOut(msgspec.Struct, kw_only=True):
    """`parity list --settings FAMILY --json` prints a list of these."""

    name: str
    default: Any
    values: list[Any] | None
    meaning: str


class CheckOut(msgspec.Struct, kw_only=True):
    """`parity list --checks TRAINER --json` prints a list of these."""

    name: str
    run_as: list[str]
    cases: dict[str, int]
    settings: list[str]
    meaning: str


class ProfileOut(msgspec.Struct, kw_only=True):
    """`parity list --profiles --json` prints a list of these."""

    name: str
    fixed_seed: bool
    cases: dict[str, int]


class CoveredOut(msgspec.Struct, kw_only=True):
    """`parity list --coverage RESULTS --json` prints a list of these, what was never judged first."""

    of: str
    kind: str
    name: str
    judged: int
    declined: int
    why: str = ""


class DoctorOut(msgspec.Struct, kw_only=True):
    """`parity doctor --json`."""

    versions: dict[str, str]
    device: str
    device_text: str
    problems: list[str]
    compiler: str | None
    ready: list[str]
    interpreted: list[str]
    blocked: dict[str, list[str]]
    rollouts: list[str]
    engine: str | None
    tools: dict[str, bool]


def text(value: Any) -> str:
    """The JSON of a structure or of a list of them, indented."""
    return msgspec.json.format(msgspec.json.encode(value), indent=1).decode()


def filled(kind: type[Out], source: Any, **fields: Any) -> Out:
    """A structure with these fields, and the others from attributes of the same name."""
    return kind(**{name: fields[name] if name in fields else getattr(source, name) for name in kind.__struct_fields__})


def of_run(summary: Summary, code: int, reasons: Sequence[str]) -> RunOut:
    """A run as its reports show it."""
    found = {
        name: [FindingOut(f.cases, list(f.dtypes), list(f.roots), f.lead) for f in getattr(summary, of)]
        for name, of in (("new", "findings"), ("known", "known"))
    }
    compared = dict(summary.compared)
    return filled(RunOut, summary, exit_code=code, reasons=list(reasons), compared=compared, **found)
