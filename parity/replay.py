"""`parity replay`: one case again, whatever the ledger says. 0 agrees, 1 disagrees, 125 anything that is no judgement."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from parity import data, trainers
from parity.case import Case
from parity.errors import UsageError
from parity.families import family
from parity.header import resolve_device
from parity.implementations import Implementation, select
from parity.ledger import Ledger
from parity.run import Row, run_case
from parity.session import FAILING
from parity.worker import prepare

AGREES, DISAGREES, NO_JUDGEMENT = 0, 1, 125


def find(name: str, reports: Path = Path("reports")) -> tuple[Case, str | None]:
    """A case by file, by the id of a ledger entry, or by the id of a case in reports/; with the implementation it names.

    Raises:
        UsageError: when nothing has this name.
    """
    path = Path(name)
    if path.suffix == ".json" or path.exists():
        case = Case.load(path)
        raw = json.loads(path.read_text())
        return case, raw.get("implementation")
    ledger = Ledger.load(data.ledger_file())
    for entry, case in ledger.frozen():
        if entry.id == name:
            return case, None
    recorded = sorted((data.cases_dir() / "history").glob("*.json"))
    for file in [*data.frozen_cases(), *recorded, *sorted((reports / "findings").glob("*.json"))]:
        case = Case.load(file)
        if name in (case.id, file.stem):
            return case, json.loads(file.read_text()).get("implementation")
    for case in (case for trainer in trainers.names() for case in trainers.cases(trainer, "pr", 0)):
        if case.id == name:
            return case, f"{case.family}.released"
    drawn = _from_rows(name, reports / "results.ndjson")
    if drawn is not None:
        return drawn, None
    ids = ", ".join(e.id for e in ledger.entries)
    raise UsageError(f"case {name!r}: no such file, ledger entry ({ids}) or case in {reports}/results.ndjson")


def _from_rows(name: str, path: Path) -> Case | None:
    """Rebuild a case from its rows: they carry its seed and settings."""
    if not path.exists():
        return None
    with path.open() as lines:
        for line in lines:
            if f'"{name}"' not in line:
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                continue
            if row.get("case") == name:
                fam = family(row["family"])
                return fam.case(
                    row["seed"], row["dtype"], {k: v for k, v in row["settings"].items() if k in fam.settings}
                )
    return None


def replay(name: str, ids: Sequence[str], device: str, issue: bool, console: Console) -> int:
    """Run the case through the named implementations (else the one it was found with, else all) and print the findings."""
    from parity.report import failure

    case, found_with = find(name)
    if issue and trainers.is_trainer(case.family):
        raise UsageError(f"case {case.id} is a trainer check: --issue writes the script of a loss; leave it out")
    family(case.family).full_settings(case)
    device = resolve_device(device)
    prepare(device, threads=1)
    chosen = [i for i in select(ids or ([found_with] if found_with else ())) if i.family == case.family]
    if not chosen:
        raise UsageError(f"case {case.id} is of family {case.family}; none of {', '.join(ids)} is")
    wanted = {i.id for i in chosen}
    references = [i for i in select(()) if i.family == case.family and i.role == "reference" and i.id not in wanted]
    rows = list(run_case(case, [*references, *chosen], device))
    if issue:
        return _issue(case, chosen, rows, console)
    for implementation in chosen:
        own = [r for r in rows if r["implementation"] == implementation.id]
        failure.render_finding(own, console)
        failure.render_rest(own, console)
    return exit_code([r for r in rows if r["implementation"] in wanted])


def exit_code(rows: Sequence[Row]) -> int:
    """1 when anything judged disagrees, 0 when something was judged and all of it agrees, else 125."""
    if any(r["verdict"] == "disagree" for r in rows):
        return DISAGREES
    if any(r["verdict"] in FAILING for r in rows) or not any(r["verdict"] == "agree" for r in rows):
        return NO_JUDGEMENT
    return AGREES


def _issue(case: Case, chosen: Sequence[Implementation], rows: list[dict[str, Any]], console: Console) -> int:
    """Print the upstream report of the first implementation that disagrees."""
    from parity.issue import issue_text

    for implementation in chosen:
        own = [r for r in rows if r["implementation"] == implementation.id]
        if exit_code(own) == DISAGREES:
            console.file.write(issue_text(case, implementation, rows) + "\n")
            return DISAGREES
    console.print(f"case {case.id}: nothing to report, no implementation disagrees here", markup=False)
    return exit_code(rows)
