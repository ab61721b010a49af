"""Past runs, kept: one small SQLite file a run in `reports/history/`, so that a report can say since when.

A run is kept as sums: what was compared by implementation, family, device, dtype and quantity with the worst headroom, and the
findings, the new ones with the rows of their smallest case. Other rows stay in results.ndjson, cases in `reports/findings/`.
"""

import contextlib
import dataclasses
import datetime
import json
import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from parity.decoding import decode
from parity.errors import UsageError
from parity.results.report.findings import Finding
from parity.results.report.outcomes import headroom
from parity.results.report.summary import Summary
from parity.results.row import Row, finite
from parity.results.step import CommandOutcome

SCHEMA = 1
FOLDER = Path("reports/history")
SHOWN = 100
"""New findings whose rows are kept."""

_TABLES = """
CREATE TABLE run (schema INTEGER, id TEXT, started TEXT, profile TEXT, device TEXT, seed INTEGER, revision TEXT,
                  versions TEXT, exit_code INTEGER, ended INTEGER, seconds REAL, page TEXT, whole INTEGER);
CREATE TABLE compared (implementation TEXT, family TEXT, device TEXT, cases INTEGER);
CREATE TABLE judged (implementation TEXT, family TEXT, device TEXT, dtype TEXT, quantity TEXT, cases INTEGER, headroom REAL,
                     worst TEXT, known INTEGER);
CREATE TABLE findings (key TEXT, implementation TEXT, family TEXT, verdict TEXT, class TEXT, blame TEXT, quantities TEXT,
                       known TEXT, cases INTEGER, headroom REAL, message TEXT, replay TEXT);
CREATE TABLE steps (name TEXT, exit_code INTEGER, command TEXT, seconds REAL, tail TEXT, reached TEXT);
CREATE TABLE reasons (line TEXT);
CREATE TABLE shown (key TEXT, row TEXT);
"""


@dataclasses.dataclass(frozen=True)
class Seen:
    """A finding as one run had it; `key` is the same in every run that has it again, whatever the case.

    `headroom` is None where the failure has no finite size.
    """

    key: str
    implementation: str
    family: str
    verdict: str
    cls: str | None
    blame: str | None
    quantities: str
    known: str | None
    cases: int
    headroom: float | None
    message: str
    replay: str


@dataclasses.dataclass(frozen=True)
class Judged:
    """What one run judged of one quantity: in how many cases, and the worst headroom; `known`: that row is a known finding."""

    implementation: str
    family: str
    device: str
    dtype: str
    quantity: str
    cases: int
    headroom: float | None
    worst: str
    known: bool

    @property
    def key(self) -> tuple[str, str, str, str, str]:
        """What it is compared by from run to run."""
        return self.implementation, self.family, self.device, self.dtype, self.quantity


@dataclasses.dataclass(frozen=True)
class Run:
    """A kept run; times are UTC, `seconds` on the clock, `compared`: (implementation, family, device) -> cases.

    `ended`: it came to its end in order; `whole`: it did all that it had planned, which one whose time is limited need not.
    `reasons`: why its exit code is not 0; `steps`: of a night, its other commands.
    """

    id: str
    started: datetime.datetime
    profile: str
    device: str
    seed: int | None
    revision: str
    versions: Mapping[str, str]
    exit_code: int
    ended: bool
    seconds: float
    page: str
    compared: Mapping[tuple[str, str, str], int]
    judged: tuple[Judged, ...]
    findings: tuple[Seen, ...]
    path: Path
    whole: bool = True
    reasons: tuple[str, ...] = ()
    steps: tuple[CommandOutcome, ...] = ()

    @property
    def green(self) -> bool:
        """Whether nothing had to be done about it."""
        return self.exit_code == 0 and self.ended


def key(finding: Finding) -> str:
    """What a finding is recognised by in another run: who, in which family, how, in which quantities; or its ledger entry."""
    if finding.known:
        return f"{finding.implementation} {finding.known}"
    return " ".join([finding.implementation, finding.family, finding.verdict, *sorted(finding.roots)])


def remember(
    summary: Summary,
    exit_code: int,
    folder: Path = FOLDER,
    ended: bool = True,
    page: str = "",
    reasons: Sequence[str] = (),
    steps: Sequence[CommandOutcome] = (),
) -> Path:
    """Write a run's file: complete or not at all, and once: a run that is remembered again replaces its file.

    Raises:
        UsageError: when the folder cannot be written.
    """
    header = summary.header
    started = str(header.started or datetime.datetime.now(datetime.UTC).isoformat())
    stamp = started[:19].replace(":", "").replace("-", "")
    path = folder / f"{stamp}-{summary.run}.sqlite"
    seconds = 0.0 if header.seconds is msgspec.UNSET else header.seconds
    whole = [SCHEMA, summary.run, started, header.profile, header.device, header.seed, header.git]
    whole += [json.dumps(header.versions), exit_code, ended and summary.ended, seconds, page, not summary.incomplete]
    compared: dict[tuple[str, str, str], int] = {}
    for line in summary.lines:
        where = (line.implementation, line.family, line.device)
        compared[where] = compared.get(where, 0) + line.counts.compared
    try:
        folder.mkdir(parents=True, exist_ok=True)
        draft = folder / f".{path.name}.{os.getpid()}"
        draft.unlink(missing_ok=True)
        with contextlib.closing(sqlite3.connect(draft)) as base, base:
            base.executescript(_TABLES)
            _fill(base, "run", [whole])
            _fill(base, "compared", [[*where, count] for where, count in compared.items()])
            _fill(base, "judged", _judged(summary))
            _fill(base, "steps", ([s.name, s.exit_code, s.command, s.seconds, s.tail, s.reached] for s in steps))
            _fill(base, "reasons", ([line] for line in reasons))
            _fill(base, "shown", _shown(summary.findings[:SHOWN]))
            _fill(base, "findings", (_seen(f) for f in (*summary.findings, *summary.known)))
        draft.replace(path)
    except (OSError, sqlite3.Error) as error:
        raise UsageError(f"{folder}: the run cannot be kept: {error}") from None
    return path


def runs(folder: Path = FOLDER, say: Callable[[str], object] | None = None) -> list[Run]:
    """Every kept run, the oldest first; a file that is none is left out and told to `say`.

    Raises:
        UsageError: without `say`, for a file that is no kept run, naming it.
    """
    found = []
    for path in sorted(folder.glob("[!.]*.sqlite")):
        try:
            found.append(read(path))
        except UsageError as error:
            if say is None:
                raise
            say(f"left out, cannot be read: {error}")
    return sorted(found, key=lambda run: run.started)


def read(path: Path) -> Run:
    """One kept run.

    Raises:
        UsageError: for a file that is no kept run, or one of a later parity.
    """
    try:
        with contextlib.closing(sqlite3.connect(f"file:{path.resolve()}?mode=ro", uri=True)) as base:
            (row,) = base.execute("SELECT * FROM run")
            schema, id, started, profile, device, seed, revision, versions, code, ended, seconds, page = row[:12]
            whole = bool(row[12] if len(row) > 12 else ended)  # kept by an earlier parity
            if schema != SCHEMA:
                raise UsageError(f"{path}: kept by another version of parity (schema {schema}, expected {SCHEMA})")
            compared = {(i, f, d): n for i, f, d, n in base.execute("SELECT * FROM compared")}
            judged = tuple(
                Judged(i, f, d, t, q, n, h, w, bool(k))
                for i, f, d, t, q, n, h, w, k in base.execute("SELECT * FROM judged")
            )
            found = tuple(Seen(*row) for row in base.execute("SELECT * FROM findings"))
            reasons, steps = _reasons(base), tuple(_steps(base))
            when = datetime.datetime.fromisoformat(started).astimezone(datetime.UTC)
            parsed = {str(k): str(v) for k, v in json.loads(versions).items()}
    except (sqlite3.Error, ValueError, TypeError, AttributeError) as error:
        raise UsageError(f"{path}: not a run that parity kept: {error}") from None
    kept = compared, judged, found, path, whole, reasons, steps
    return Run(id, when, profile, device, seed, revision or "", parsed, code, bool(ended), seconds, page, *kept)


def shown(run: Run, key: str) -> list[Row]:
    """The rows of the smallest case of a new finding of a kept run; none where an earlier parity kept it."""
    try:
        with contextlib.closing(sqlite3.connect(f"file:{run.path.resolve()}?mode=ro", uri=True)) as base:
            found = base.execute("SELECT row FROM shown WHERE key = ?", [key]) if _has(base, "shown") else ()
            return [decode(Row, row, str(run.path)) for (row,) in found]
    except sqlite3.Error as error:
        raise UsageError(f"{run.path}: not a run that parity kept: {error}") from None


def _reasons(base: sqlite3.Connection) -> tuple[str, ...]:
    return tuple(line for (line,) in base.execute("SELECT * FROM reasons")) if _has(base, "reasons") else ()


def _steps(base: sqlite3.Connection) -> Iterator[CommandOutcome]:
    for name, code, *rest in base.execute("SELECT * FROM steps") if _has(base, "steps") else ():
        command, seconds, tail, reached = rest or ("", 0.0, "", "")  # kept by an earlier parity
        yield CommandOutcome(name, command, code, seconds, tail, reached)


def _has(base: sqlite3.Connection, table: str) -> bool:
    return base.execute("SELECT 1 FROM sqlite_master WHERE name = ?", [table]).fetchone() is not None


def _fill(base: sqlite3.Connection, table: str, rows: Iterable[Iterable[object]]) -> None:
    for row in rows:
        values = list(row)
        base.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * len(values))})", values)


def _shown(found: Iterable[Finding]) -> Iterator[Sequence[object]]:
    for f in found:
        yield from ([key(f), msgspec.json.encode(row.to_json()).decode()] for row in f.rows)


def _judged(summary: Summary) -> Iterator[list[object]]:
    for line in summary.lines:
        where = [line.implementation, line.family, line.device, line.dtype]
        for t in line.tallies:
            yield [*where, t.quantity, t.judged, finite(headroom(t.worst)), t.worst.case, bool(t.worst.known)]


def _seen(f: Finding) -> list[object]:
    cls = "logic" if "logic" in f.classes else next(iter(f.classes), None)
    size = finite(headroom(f.worst))
    where = [key(f), f.implementation, f.family, f.verdict, cls, f.lead.blame, ", ".join(f.roots), f.known]
    return [*where, f.cases, size, f.lead.message, f.lead.replay]
