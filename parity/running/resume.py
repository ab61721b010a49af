"""Go on with a run that was stopped or killed, or join the files of several machines: held to the same everything."""

import dataclasses
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec import UNSET
from msgspec.structs import fields, replace

from parity.errors import UsageError
from parity.results.header import About, Asked, Header
from parity.results.report.rows import read
from parity.results.row import Row
from parity.running.plan import Options

FREE = {"started", "command", "plan", "seconds", "dimensions", "asked"}
"""What may differ in the headers of one run's parts; `asked` is compared by itself."""


def again(options: Options) -> tuple[Options, tuple[Header, list[Row]]]:
    """The options of the run that a results file is of, and what is in the file.

    Raises:
        UsageError: for a file of an earlier parity, and for an option that was another one then.
    """
    path = options.resume
    assert path is not None
    header, rows = read(path)
    about, asked = header.header, header.header.asked
    if not isinstance(asked, Asked) or about.profile is None:
        raise UsageError(f"{path}: written by an earlier parity, which did not record what was asked for: run anew")
    then = Options.of(asked, profile=about.profile, seed=about.seed)
    names = ["profile", "seed", *(one.name for one in fields(Asked) if one.name != "files")]
    for name in names:
        given, value = getattr(options, name), getattr(then, name)
        if given not in (getattr(Options, name), value):
            raise UsageError(f"{path}: its run had {name} {_shown(value)}, not {_shown(given)}: leave the option out")
    reports = path.parent if options.reports == Options.reports else options.reports
    return dataclasses.replace(
        options, **{name: getattr(then, name) for name in names}, results=path, reports=reports
    ), (header, rows)


def state(kind: Any, path: Path, now: Header, header: Header, rows: list[Row]) -> Any:
    """What stays of a file: the rows of shards that are done. The others are run again, whole.

    Raises:
        UsageError: naming what is not as it was then.
    """
    same(path, header, now)
    if header.header.plan != now.header.plan:
        raise UsageError(f"{path}: its run was planned otherwise: run anew")
    done = {part.name: part for part in header.parts or ()}
    kept = [row for row in rows if row.shard in done]
    head = replace(header, end=UNSET, interrupted=UNSET, parts=UNSET)
    return kind(head, kept, done, {name: part.cases for name, part in done.items()})


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
        name = next(f.name for f in fields(Asked) if getattr(a, f.name) != getattr(b, f.name))
        what = (
            next((k for k in {**a.files, **b.files} if a.files.get(k) != b.files.get(k)), "") if name == "files" else ""
        )
        raise UsageError(f"{path}: {what or name} has changed since")


def joined(paths: Sequence[Path]) -> tuple[Header, list[Row]]:
    """The header and rows of several files of one run: of every shard the first that is done.

    Raises:
        UsageError: for files that are not of one run, naming what differs.
    """
    header: Header | None = None
    rows: list[Row] = []
    run = secrets.token_hex(4)
    for path in paths:
        one, more = read(path)
        if not isinstance(one.header.asked, Asked) or not isinstance(one.header.plan, dict):
            raise UsageError(
                f"{path}: written by an earlier parity, which did not record its plan: it cannot be joined"
            )
        one.header.asked.share = ""
        done = {part.name: part for part in one.parts or ()}
        if header is None:
            header = replace(one, run=run, end=UNSET, interrupted=UNSET, parts=[])
            header.header.plan = {}
        else:
            same(path, one, header)
        assert isinstance(header.parts, list) and isinstance(header.header.plan, dict)
        fresh = set(done) - {part.name for part in header.parts}
        header.header.plan |= one.header.plan
        header.parts += [part for name, part in done.items() if name in fresh]
        rows += [replace(row, run=run) for row in more if row.shard in fresh]
    if header is None:
        raise UsageError("merge: name the results files")
    return header, rows


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "all"
    return "not there" if value is None or value is UNSET else str(value)
