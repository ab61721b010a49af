"""Releases x implementations x loss types: the greatest headroom in each cell. Computed release by release, resumable.

The columns of family policy are loss types, of divergence the kinds of divergence, of logprobs the dtypes.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import msgspec

import parity
from parity.case.case import Case
from parity.decoding import save_json, saved
from parity.errors import UsageError
from parity.registry import loss_family, resolved
from parity.results.row import DECIDED, FAILING, Row
from parity.versions.commands.compare import QUICK, SEED
from parity.versions.commands.probe import rows
from parity.versions.env.client import EnvironmentUnusable, cache_folder
from parity.versions.env.environment import Environment
from parity.versions.env.releases import span


@dataclass(frozen=True)
class Cell:
    """An implementation on the cases of a column: the greatest headroom, or why there is none.

    `verdict`: disagree if any quantity did, agree if all judged ones did, else the last verdict; `headroom` None where
    nothing was judged, or where a failure has no size; `worst`: the quantity that used most, or the message; `known`:
    the ledger entries that its failures fall under, empty where one of them is new.
    """

    verdict: str
    headroom: float | None
    worst: str
    known: tuple[str, ...] = ()

    @property
    def new(self) -> bool:
        """Whether something failed that the ledger does not know."""
        return self.verdict in FAILING and not self.known


@dataclass(frozen=True)
class Line:
    """A release: its partners on one line, and cells by (implementation, column); none where `unusable` says why."""

    version: str
    partners: str
    cells: Mapping[tuple[str, str], Cell]
    unusable: str = ""


def columns(name: str) -> dict[str, list[Case]]:
    """Column -> cases, for a loss family."""
    return loss_family(name).matrix(SEED)


def implementations(name: str, named: Sequence[str], package: str) -> list[str]:
    """The named implementations of the family, else TRL's and Liger's that need no interpreter, and the package's own."""
    from parity.registry import select

    chosen = select(named, name)
    if not named:
        chosen = [i for i in chosen if i.library == package or (i.library in QUICK and not i.interpreted)]
    if not chosen:
        raise UsageError(f"family {name!r} has no implementation {', '.join(named)}")
    return [i.id for i in chosen]


def matrix(
    package: str,
    text: str,
    name: str,
    named: Sequence[str],
    workers: int,
    say: Callable[[str], None],
    device: str = "cpu",
) -> list[Line]:
    """The lines of a range, oldest first; each release is kept on disk once it is done, and not run again.

    EnvironmentUnusable when the range is empty or the index cannot be read; a release that cannot be made is a line.
    """
    name = resolved(name)
    asked, wanted = columns(name), implementations(name, named, package)
    versions = [one.version for one in span(package, text)]
    ids = [[case.id for case in cases] for cases in asked.values()]
    kept = folder("matrix", [package, ids, list(wanted), device])
    lines: dict[str, Line] = {}
    with ThreadPoolExecutor(workers) as pool:
        jobs = {pool.submit(_line, package, version, asked, wanted, kept, device): version for version in versions}
        for number, job in enumerate(as_completed(jobs), 1):
            line = lines[jobs[job]] = job.result()
            say(f"{number} of {len(versions)}: {package} {line.version} {line.unusable or line.partners}")
    return [lines[version] for version in versions]


def folder(kind: str, question: object) -> Path:
    """Where the answers to this very question are kept: another harness, another folder."""
    root = Path(parity.__file__).parent
    sources = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(root.rglob("*.py"))))
    asked = json.dumps([question, sources.hexdigest()])
    return cache_folder(kind, hashlib.sha256(asked.encode()).hexdigest()[:12])


def _line(
    package: str, version: str, asked: Mapping[str, Sequence[Case]], wanted: Sequence[str], kept: Path, device: str
) -> Line:
    file = kept / f"{version}.json"
    if (known := saved(_Kept, file)) is not None:
        return Line(version, known.partners, {(one, column): found for one, column, found in known.cells})
    try:
        made = Environment.of([f"{package}=={version}"])
        found = rows(made, [case for cases in asked.values() for case in cases], wanted, device)
    except EnvironmentUnusable as error:
        # Not kept: the index or the disk may be to blame.
        return Line(version, "", {}, str(error))
    cells = {(one, column): cell(found, one, cases) for one in wanted for column, cases in asked.items()}
    line = Line(version, made.partners, cells)
    save_json(file, _Kept(made.partners, [(*key, value) for key, value in cells.items()]))
    return line


class _Kept(msgspec.Struct):
    partners: str
    cells: list[tuple[str, str, Cell]]


def cell(found: Sequence[Row], implementation: str, cases: Sequence[Case]) -> Cell:
    """The summary of the rows of some cases."""
    ids = {case.id for case in cases}
    mine = [r for r in found if r.implementation == implementation and r.case in ids]
    judged = [r for r in mine if r.quantity is not None and r.judged]
    failing = [r.known for r in mine if r.failing]
    known = tuple(sorted({entry for entry in failing if entry})) if all(failing) else ()
    if crashed := next((r for r in mine if r.verdict == "crashed"), None):
        return Cell("crashed", None, crashed.message, known)
    if not judged:
        if not mine:
            return Cell("unsupported", None, "not among the implementations there")
        return Cell(mine[-1].verdict, None, mine[-1].message)
    worst = max(judged, key=_badness)
    return Cell(worst.verdict, worst.headroom, worst.subject, known)


def _badness(row: Row) -> tuple[bool, bool, float]:
    """New failures before known ones, and those before what agrees; then by headroom."""
    failing = row.verdict != "agree"
    return failing and not row.known, failing, math.inf if row.headroom is None else row.headroom


def exit_code(lines: Sequence[Line]) -> int:
    """0, 1 when the newest release that could be judged fails where the ledger knows of nothing, 3 when none could."""
    judged = [line for line in lines if any(c.verdict in DECIDED for c in line.cells.values())]
    if not judged:
        return 3
    return int(any(c.new for c in judged[-1].cells.values()))
