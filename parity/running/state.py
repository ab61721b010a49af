"""A run's results file, which is its journal: rows, the shards that are done, and what a run goes on with after a kill."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from msgspec import UNSET
from msgspec.structs import fields, replace

from parity.errors import UsageError
from parity.results.report.rows import read, rewrite
from parity.results.row import About, Asked, Header, Part, Row
from parity.running.plan import ASKED, Options

FREE = {"started", "command", "plan", "ends", "seconds", "asked"}
"""What may differ in the headers of one run; `asked` is compared by itself."""


@dataclasses.dataclass
class RunResult:
    """What there is of a run. `cases`: how many of each shard; `parts`: the shards that are done."""

    header: Header
    rows: list[Row] = dataclasses.field(default_factory=list)
    parts: dict[str, Part] = dataclasses.field(default_factory=dict)
    cases: dict[str, int] = dataclasses.field(default_factory=dict)
    lost: list[str] = dataclasses.field(default_factory=list)
    exit_code: int = 0
    reasons: list[str] = dataclasses.field(default_factory=list)
    options: Options = dataclasses.field(default_factory=Options)

    @classmethod
    def of(cls, header: Header, rows: list[Row]) -> RunResult:
        """What stays of a file: the rows of shards that are done. The others are run again, whole."""
        parts = {part.name: part for part in header.parts or ()}
        kept = [row for row in rows if row.shard in parts]
        return cls(header, kept, parts, {name: part.cases for name, part in parts.items()})

    @property
    def done(self) -> int:
        """Cases of the plan that were run."""
        planned = self.header.header.shards
        return sum(count for name, count in self.cases.items() if name in planned)

    def rewrite(self, path: Path) -> None:
        """Its file anew, without an end."""
        rewrite(path, replace(self.header, parts=list(self.parts.values())), self.rows)


def again(options: Options) -> tuple[Options, RunResult]:
    """The options of the run that a results file is of, and what stays of it. Raises UsageError for a file of an
    earlier parity, and for an option that was another one then."""
    path = options.resume
    assert path is not None
    header, rows = read(path)
    about, asked = header.header, header.header.asked
    if not isinstance(asked, Asked) or about.profile is None:
        raise UsageError(f"{path}: written by an earlier parity, which did not record what was asked for: run anew")
    then = Options.of(asked, profile=about.profile, seed=about.seed)
    if options.confirm and not then.confirm:
        raise UsageError(f"{path}: `parity run` has written it since: start a new night")
    names = ["profile", "seed", *ASKED]
    for name in names:
        given, value = getattr(options, name), getattr(then, name)
        if given not in (getattr(Options, name), value):
            raise UsageError(f"{path}: its run had {name} {_shown(value)}, not {_shown(given)}: leave the option out")
    reports = path.parent if options.reports == Options.reports else options.reports
    then = dataclasses.replace(options, **{name: getattr(then, name) for name in names}, results=path, reports=reports)
    return then, RunResult.of(header, rows)


def same(path: Path | str, then: Header, now: Header) -> None:
    """Raises UsageError naming what is not the same in two headers, the first of them of `path`."""
    for one in fields(About):
        a, b = getattr(then.header, one.name), getattr(now.header, one.name)
        if one.name in FREE or a == b:
            continue
        if isinstance(a, dict) and isinstance(b, dict):
            key = next(k for k in {**a, **b} if a.get(k) != b.get(k))
            raise UsageError(f"{path}: {key} was {_shown(a.get(key))}, here it is {_shown(b.get(key))}")
        raise UsageError(f"{path}: {one.name} was {_shown(a)}, here it is {_shown(b)}")
    a, b = then.header.asked, now.header.asked
    if isinstance(a, Asked) and isinstance(b, Asked) and a != b:
        changed = [name for name in {**a.files, **b.files} if a.files.get(name) != b.files.get(name)]
        names = [one.name for one in fields(Asked) if getattr(a, one.name) != getattr(b, one.name)]
        raise UsageError(f"{path}: {changed[0] if names == ['files'] else names[0]} has changed since")


def differs(head: Header, there: Header, node: str) -> str:
    """What is another one in the header that a run has on a node; "" where nothing is, and the node takes part."""
    then, now = head.header.asked or Asked(), there.header.asked or Asked()
    if list(then.files.values()) == list(now.files.values()):  # the shipped ledger's path is each node's own
        now.files = then.files
    try:
        same(node, there, head)
    except UsageError as error:
        return str(error)
    return ""


@contextlib.contextmanager
def locked(folder: Path, name: str = ".lock") -> Iterator[None]:
    """A folder of reports for one run, or night, at a time. Raises UsageError naming the process of the other."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open(folder / name, "a+")  # noqa: SIM115 held open as long as the lock is
    except OSError as error:
        raise UsageError(f"{folder}: cannot be written: {error.strerror}") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            who = f"process {file.read().strip() or 'another'}"
            raise UsageError(f"{folder}: {who} writes its reports there; choose another --reports") from None
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield
        file.truncate(0)


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "all"
    return "not there" if value is None or value is UNSET else str(value)
