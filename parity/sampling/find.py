"""Find a case by name: a file, a ledger entry, or the id of a case that is frozen, listed or in the last results."""

import difflib
import os
from collections.abc import Sequence
from pathlib import Path

from parity import data
from parity.case.case import Case, Frozen
from parity.errors import UsageError
from parity.registry import family, meant
from parity.results.ledger import Ledger
from parity.results.report.rows import read
from parity.results.row import Row
from parity.trainers import catalogue
from parity.trainers.specs import TRAINERS


def followed(ids: Sequence[str], found_with: str | None, case: Case) -> tuple[str, ...]:
    """Whom a case is run through: those named on the command line, else the one that its file names, else all (). Raises
    UsageError where the case's file names a Python file. Data never says what code is loaded."""
    if ids or not found_with:
        return tuple(ids)
    if ".py:" in found_with:
        raise UsageError(
            f"case {case.id} was found with {found_with}: code that a case names is not loaded; if you trust it, add "
            f"--implementation {found_with}"
        )
    return (found_with,)


def find(name: str, reports: Path = Path("reports")) -> tuple[Case, str | None]:
    """A case by file, by the id of a ledger entry (the shipped ledger's, or that of the run), or by the id of a case in reports/
    (or that results file) or a folder of it; with the implementation it names. Raises UsageError when nothing has this name."""
    path = Path(name)
    if path.suffix == ".json" or os.path.exists(name):  # also of what is too long for a file
        found = Frozen.load(path)
        return found.case, found.implementation
    ledger = Ledger.load(data.ledger_file())
    if entry := _of_entry(ledger, name):
        return entry
    folder = reports.parent if reports.is_file() else reports
    folders = [folder, *sorted(file.parent for file in folder.glob("*/results.ndjson"))]
    recorded = sorted((data.cases_dir() / "history").glob("*.json"))
    findings = [f for r in folders for f in sorted((r / "findings").glob("*.json"))]
    for file in [*data.frozen_cases(), *recorded, *findings]:
        found = Frozen.load(file)
        if name in (found.case.id, file.stem):
            return found.case, found.implementation
    for case in (case for trainer in TRAINERS for case in catalogue.cases(trainer, "pr", 0, own=True)):
        if case.id == name:
            return case, f"{case.family}.released"
    files = [folder / "results.ndjson" for folder in folders]
    for file in [reports, *files] if reports.is_file() else files:
        header, rows = read(file) if file.exists() else (None, ())
        asked = header.header.asked if header else None
        own = asked.ledger if asked else None
        if own and Path(own).exists() and (entry := _of_entry(Ledger.load(Path(own)), name)):
            return entry
        if drawn := next((case_of(row) for row in rows if row.case == name and row.seed is not None), None):
            return drawn, None
    known = [e.id for e in ledger.entries]
    close = difflib.get_close_matches(name, known, 1, 0.75)
    hint = meant(name, known) if close else "parity findings names the entries"
    place = reports if reports.is_file() else folder / "results.ndjson"
    raise UsageError(
        f"case {name[:200]!r}: no such file, entry of the ledger or case in {place} (another: --reports); {hint}"
    )


def _of_entry(ledger: Ledger, name: str) -> tuple[Case, None] | None:
    return next(((case, None) for entry, case in ledger.frozen() if entry.id == name), None)


def only_one(name: str) -> str | None:
    """The implementation of the ledger entry with this id, if it is of one."""
    named = next((e.implementations for e in Ledger.load(data.ledger_file()).entries if e.id == name), ())
    return named[0] if len(named) == 1 and "*" not in named[0] else None


def case_of(row: Row) -> Case | None:
    """The case of a row, which carries its seed and settings; None for one of stored tensors, which it does not carry."""
    fam = family(row.family)
    if row.seed is None:
        return None
    made = fam.case(row.seed, row.dtype, {k: v for k, v in row.settings.items() if k in fam.settings})
    return made if made.id == row.case else None
