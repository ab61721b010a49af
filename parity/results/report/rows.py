"""The results file: strict JSON, a line for each case and for each comparison, written during the run, so that a killed run keeps
its rows."""

import contextlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from msgspec import UNSET, to_builtins
from msgspec.structs import replace

from parity.decoding import convert, decode, of_schema, short
from parity.errors import UsageError
from parity.results.row import DECLINED, SCHEMA, Header, Last, Parted, Row

Record: TypeAlias = Header | Row | Parted | Last
OF_CASE = ("family", "dtype", "device", "seed", "settings", "features", "shard", "frozen")
"""Fields of a row that its file has once for each case."""
OF_COMPARISON = "implementation role against recipe minimised unjudged imported_from replay".split()
"""And once for each implementation on a case."""
OF_FAILING = ("recipes", "worst", "tokens", "max_abs", "allclose", "atol", "rtol", "value_reference")
"""Fields that are kept of a row that fails: reports show no others'."""
OF_JUDGED = ("against", "recipe")  # fields of a row that was not declined


class Writer(contextlib.AbstractContextManager["Writer"]):
    """A results file; called with each record, the header first. A line where a case begins, then one for each comparison,
    which says what is other there: it is in the file when the next record is not a row of it. Folders are made. An existing
    file is replaced, or with `append` continued. Raises UsageError when the file cannot be written; ValueError: when called
    with a row that holds NaN or an infinity (rows hold null there)."""

    def __init__(self, path: str | Path, append: bool = False):
        self._path = Path(path)
        self._case: dict[str, Any] = {}
        self._last: dict[str, Any] = {}
        self._quantities: list[str] = []
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | (0 if append else os.O_TRUNC)
            self._file = os.fdopen(os.open(path, flags, 0o666), "wb", buffering=0)
        except OSError as error:
            raise UsageError(f"{path}: cannot be written: {error.strerror}") from None

    def __call__(self, record: Record) -> None:
        if isinstance(record, Row):
            self._add(record)
        else:
            self._end()
            self._line(_text(to_builtins(record)))

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        with self._file:
            if kind is None:
                self._end()

    def _line(self, text: str) -> None:
        # One system call a line: a kill leaves at most one line cut, and two writers never mix within one.
        try:
            self._file.write(text.encode() + b"\n")
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from None

    def _add(self, row: Row) -> None:
        data = _kept(row)
        case = {name: data.pop(name) for name in ("case", *OF_CASE) if name in data}
        begins = any(case.get(name) != self._case.get(name) for name in ("case", "shard", "frozen"))
        other = {} if begins else {n: getattr(row, n) for n in OF_CASE if case.get(n) != self._case.get(n)}
        comparison = {"case": row.case} | {name: data.pop(name) for name in OF_COMPARISON if name in data} | other
        begin, _, quantity = _text(case), _text(comparison), _text(data)
        if begins or comparison != self._last:
            self._end()
            self._last = comparison
        if begins:
            self._line(begin)
            self._case = case
        self._quantities.append(quantity)

    def _end(self) -> None:
        """Write the comparison whose rows came last."""
        if self._last:
            self._line(f'{_text(self._last)[:-1]},"quantities":[{",".join(self._quantities)}]}}')
        self._last, self._quantities = {}, []


def _kept(row: Row) -> dict[str, Any]:
    """What of a row is written: nothing that its line says already, and only what is read of a row of its verdict."""
    without = {"run", *(() if row.failing else OF_FAILING), *(OF_JUDGED if row.verdict in DECLINED else ())}
    data = {name: value for name, value in to_builtins(row).items() if name not in without}
    if row.features:
        data["features"] = {name: value for name, value in row.features.items() if value is not False}
    for name, default in _derived(data).items():
        data.pop(name, None)
        if getattr(row, name) != default:
            data[name] = getattr(row, name)
    return data


def _derived(data: Mapping[str, Any]) -> dict[str, Any]:
    """What fields of a row are where its lines do not say so."""
    replay = f"parity replay {data['case']} --implementation {data.get('implementation')}"
    return {"replay": replay, "gates": {data["gate"]: data.get("headroom")} if "gate" in data else {}}


def _text(data: Mapping[str, Any]) -> str:
    return json.dumps(data, allow_nan=False, separators=(",", ":"))


def read(path: str | Path) -> tuple[Header, list[Row]]:
    """The header, which carries the run's end and the shards that are done, and all other rows. A last line that was left
    half written is dropped; the header has `interrupted` then, and where an end is missing. Raises UsageError: one line
    that names the file, the line number and what is wrong there."""
    path = Path(path)
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise UsageError(f"{path}: no such results file (parity run writes one)") from None
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
    *lines, rest = content.split(b"\n")
    if not lines:
        raise UsageError(f"{path}: no header row; the run that wrote it ended before it began")
    first, where = decode(Any, lines[0], f"{path} line 1"), f"{path} line 1"
    if not isinstance(first, dict) or not isinstance(first.get("header"), dict):
        raise UsageError(f"{where}: expected the header row {{schema, run, header}} of a results file")
    of_schema(first, SCHEMA, where, "a header")
    header: Header = convert(Header, first, where)
    rows: list[Row] = []
    cases: dict[str, dict[str, Any]] = {}
    for number, line in enumerate(lines[1:], 2):
        if line.strip():
            _take(line, f"{path} line {number}", header, rows, cases)
    if rest.strip() or (header.header.ends is True and header.end is UNSET):
        header.interrupted = True
    return header, rows


def rewrite(path: Path, header: Header, rows: Iterable[Row]) -> None:
    """Write a results file anew, whole or not at all: the header, the rows and the shards that are done; no end record."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with Writer(draft) as write:
        write(replace(header, schema=SCHEMA, end=UNSET, interrupted=UNSET, parts=UNSET))
        for row in rows:
            write(row)
        for part in header.parts or ():
            write(Parted(part=part, run=header.run))
    draft.replace(path)


def _take(line: bytes, where: str, header: Header, rows: list[Row], cases: dict[str, dict[str, Any]]) -> None:
    """A line after the header; `cases`: the fields of those that were read."""
    data: dict[str, Any] = decode(dict[str, Any], line, where)
    if "end" in data:
        header.end = convert(Last, data, where).end
        return
    run = data.get("run")
    if run and header.run and run != header.run:
        both = f"a row of run {short(str(run))} under the header of run {short(header.run)}"
        raise UsageError(f"{where}: {both}: two runs in one file")
    if "part" in data:
        header.parts = [*(header.parts or ()), convert(Parted, data, where).part]
    elif "quantities" in data:
        name = convert(str, data.get("case"), where)
        if name not in cases:
            raise UsageError(f"{where}: a comparison on case {short(name)}, of which no line before says what it is")
        quantities = convert(list[dict[str, Any]], data.pop("quantities"), where)
        whole = {"run": header.run} | cases[name] | data
        rows += [convert(Row, _derived(whole | one) | whole | one, where) for one in quantities]
    else:
        cases[convert(str, data.get("case"), where)] = data
