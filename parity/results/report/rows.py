"""The results file: one strict JSON object a line, written during the run, so that a killed run keeps its rows."""

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

from msgspec import UNSET
from msgspec.structs import replace

from parity.decoding import convert, decode, json_of, of_schema, short
from parity.errors import UsageError
from parity.results.header import Header, Last, Parted
from parity.results.row import SCHEMA, Row

Record: TypeAlias = Header | Row | Parted | Last | Mapping[str, Any]


@contextlib.contextmanager
def writer(path: str | Path, append: bool = False) -> Iterator[Callable[[Record], None]]:
    """Open a results file; the function it returns writes one row, the header first, and flushes it.

    Folders are made. An existing file is replaced, or with `append` continued, less a last line that was left half
    written.

    Raises:
        UsageError: when the file cannot be written.
        ValueError: from the function, for a row that holds NaN or an infinity (rows hold null there).
    """
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = _opened(path, append)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror}") from None

    def write(row: Record) -> None:
        data = row if isinstance(row, Mapping) else row.to_json()
        try:
            line = json.dumps(data, allow_nan=False)
        except ValueError as error:
            bad = ", ".join(k for k, v in data.items() if not _strict(v))
            who = " ".join(str(data[k]) for k in ("case", "implementation", "quantity") if k in data)
            raise ValueError(
                f"row {who}: {bad} is not strict JSON ({error}); write null for what is not finite"
            ) from None
        # One system call a line: a kill leaves at most one line cut, and two writers never mix within one.
        try:
            file.write(line.encode() + b"\n")
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from None

    with file:
        yield write


def read(path: str | Path) -> tuple[Header, list[Row]]:
    """The header row and all others; the header carries the run's end record under `end`, and the shards done under `parts`.

    A last line that was left half written is dropped. The header has `interrupted` then, and where a run that writes an
    end record has left none.

    Raises:
        UsageError: one line that names the file, the line number and what is wrong there.
    """
    path = Path(path)
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise UsageError(f"{path}: no such results file (parity run writes one)") from None
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
    *lines, rest = content.split(b"\n")
    header: Header | None = None
    rows: list[Row] = []
    for number, line in enumerate(lines, 1):
        if header is None:
            header = _header(line, f"{path} line {number}")
        elif line.strip():
            _take(line, f"{path} line {number}", header, rows)
    if rest.strip():
        where = f"{path} line {len(lines) + 1}"
        try:
            json_of(rest, where)
        except UsageError:
            if header is not None:
                header.interrupted = True
        else:  # complete but for its line break
            if header is None:
                header = _header(rest, where)
            else:
                _take(rest, where, header, rows)
    if header is None:
        raise UsageError(f"{path}: no header row; the run that wrote it ended before it began")
    if header.header.ends is True and header.end is UNSET:
        header.interrupted = True
    return header, rows


END, PART = b'{"end": ', b'{"part": '
"""How the record of a run's end begins, which is the last line, and that of a shard's."""


def rewrite(path: Path, header: Header, rows: Iterable[Row]) -> None:
    """Write a results file anew, whole or not at all: the header, the rows and the shards that are done; no end record."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with writer(draft) as write:
        write(replace(header, end=UNSET, interrupted=UNSET, parts=UNSET))
        for row in rows:
            write(row)
        for part in header.parts or ():
            write(Parted(part=part, run=header.run))
    draft.replace(path)


def _take(line: bytes, where: str, header: Header, rows: list[Row]) -> None:
    if line.startswith(END):
        header.end = decode(Last, line, where).end
    elif line.startswith(PART):
        if not isinstance(header.parts, list):
            header.parts = []
        header.parts.append(_of_run(decode(Parted, line, where), where, header).part)
    else:
        rows.append(_of_run(decode(Row, line, where), where, header))


def _of_run(row: Any, where: str, header: Header) -> Any:
    if row.run and header.run and row.run != header.run:
        both = f"a row of run {short(row.run)} under the header of run {short(header.run)}"
        raise UsageError(f"{where}: {both}: two runs in one file")
    return row


def _header(line: bytes, where: str) -> Header:
    data = json_of(line, where)
    if not isinstance(data, dict) or not isinstance(data.get("header"), dict):
        raise UsageError(f"{where}: expected the header row {{schema, run, header}} of a results file")
    of_schema(data, SCHEMA, where, "a header")
    found: Header = convert(Header, data, where)
    return found


def _opened(path: Path, append: bool) -> BinaryIO:
    if append:
        with contextlib.suppress(FileNotFoundError), open(path, "r+b") as file:
            content = file.read()
            file.truncate(content.rfind(b"\n") + 1)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | (0 if append else os.O_TRUNC)
    return os.fdopen(os.open(path, flags, 0o666), "wb", buffering=0)


def _strict(value: Any) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        return False
    return True
