"""`parity upstream`: each entry of the ledger as a folder that a person can send: script, text, and what it printed here."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from parity.case.case import Case
from parity.errors import UsageError
from parity.implementations.implementation import Implementation
from parity.process import prepare
from parity.registry import facts, load, run_case
from parity.results.ledger import Entry, Ledger
from parity.results.row import Row
from parity.tools.issue.ran import ran
from parity.tools.issue.text import issue_text, script_of

SHOWS, GONE = 1, 0
"""Exit codes of a script: the defect shows, it is gone."""


@dataclasses.dataclass(frozen=True)
class Sent:
    """What became of an entry: `code` of its script in a fresh process, None where none could be written and why."""

    id: str
    code: int | None
    told: str

    @property
    def right(self) -> bool:
        """Whether the script shows the defect; where the installed release cannot have it, there is nothing to show."""
        return self.code == SHOWS or self.code is None


def entries(ledger: Ledger, ids: Sequence[str]) -> list[Entry]:
    """The entries called for, all if none is named.

    Raises:
        UsageError: for an id that does not exist.
    """
    known = {e.id: e for e in ledger.entries}
    for name in ids:
        if name not in known:
            raise UsageError(f"entry {name!r} is unknown, choose from {', '.join(known)}")
    return [known[name] for name in ids or known]


def written(entry: Entry, ledger: Ledger, folder: Path) -> Sent:
    """Write one entry's folder: script.py, issue.md and result.json."""
    case = Case.load(ledger.folder / entry.case)
    if not entry.in_force():
        return Sent(entry.id, None, f"not in the installed versions: {json.dumps(dict(entry.versions))}")
    concerned = [i for i in load().values() if i.family == case.family and entry.covers_implementation(i.id)]
    usable = [i for i in concerned if i.missing() is None]
    if not usable:
        return Sent(entry.id, None, concerned[0].missing() or "" if concerned else "no implementation")
    for implementation in usable:
        rows = list(run_case(case, [implementation], thorough=True))
        inside = [r for r in rows if r.failing and entry.covers(r, facts(case))]
        if inside:
            return _sent(entry, case, implementation, inside, folder / entry.id)
    return Sent(entry.id, None, "nothing fails here")


def _sent(entry: Entry, case: Case, implementation: Implementation, rows: Sequence[Row], folder: Path) -> Sent:
    code = script_of(case, implementation, rows, entry)
    done = ran(code)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "script.py").write_text(code, encoding="utf-8")
    (folder / "issue.md").write_text(issue_text(case, implementation, rows, entry, code, done), encoding="utf-8")
    last = (done.output.strip() or done.error.strip()).splitlines()[-1:]
    (folder / "result.json").write_text(json.dumps({"exit code": done.code, "last line": last}) + "\n")
    return Sent(entry.id, done.code, last[0] if last else "")


def _task(id: str, ledger_file: Path, folder: Path) -> Sent:
    prepare("cpu", 1)
    ledger = Ledger.load(ledger_file)
    try:
        return written(entries(ledger, [id])[0], ledger, folder)
    except Exception as error:  # one entry that cannot be written leaves the others theirs; it counts as a failure
        return Sent(id, -1, f"{type(error).__name__}: {error}")


def upstream(ids: Sequence[str], ledger_file: Path, folder: Path, workers: int) -> Iterator[Sent]:
    """Write the folders of some entries, all if none is named, each in a process of its own."""
    wanted = [e.id for e in entries(Ledger.load(ledger_file), ids)]
    with concurrent.futures.ProcessPoolExecutor(workers, max_tasks_per_child=8) as pool:
        for job in concurrent.futures.as_completed([pool.submit(_task, i, ledger_file, folder) for i in wanted]):
            yield job.result()
