"""What frozen cases gave when they were measured. A frozen case is the same in every run, so what it gives can be held against
that: a known finding that grew threefold there, changed its class or shows in another quantity is a new one."""

import collections
import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from packaging.version import Version

from parity.decoding import convert, decode, text_of, write
from parity.process import installed
from parity.results.ledger import GROWTH, Entry
from parity.results.row import Class, Row, finite

PACKAGES = "torch transformers trl liger-kernel cut-cross-entropy triton accelerate peft bitsandbytes unsloth-zoo unsloth".split()
"""Their versions decide what a case gives."""


class Recorded(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a frozen case gave on a device with these versions. `failing`: implementation -> quantity (or verdict, where
    there is none) -> its class and headroom, of all that the ledger knew; None: it has none. `agreeing`: the
    implementations of which it knew nothing there."""

    device: str
    versions: dict[str, str]
    failing: dict[str, dict[str, tuple[Class | None, float | None]]] = {}
    agreeing: tuple[str, ...] = ()

    @property
    def implementations(self) -> set[str]:
        """Those that were judged."""
        return {*self.failing, *self.agreeing}

    def holds(self, row: Row) -> bool:
        """Whether it says what to expect of a row: on this device, and where no package is older than it was."""
        here = {name: version for name in self.versions if (version := installed(name))}
        newer = all(Version(here[n]) >= Version(self.versions[n]) for n in here)
        return row.device == self.device and row.implementation in self.implementations and newer

    def differs(self, row: Row, entry: Entry) -> str:
        """How a row that the entry covers is not what was recorded, in words; "" where it is. Of an entry that allows
        `nondeterministic` nothing is: what memory held decides what shows, and how large."""
        if "nondeterministic" in entry.verdicts:
            return ""
        before = self.failing.get(row.implementation, {})
        if row.subject not in before:
            return f"{row.subject} fails, which it did not" + (f" (only {', '.join(before)})" if before else "")
        cls, size = before[row.subject]
        if cls and row.cls and cls != row.cls:
            return f"class {row.cls}, which was {cls}"
        if size is None:
            return ""
        now = math.inf if row.headroom is None else row.headroom
        return f"headroom {now:.3g}, which was {size:.3g}" if now > GROWTH * size else ""


def altered(row: Row, entry: Entry | None, records: Iterable[Recorded]) -> str:
    """How a row that the entry covers is not what any of the records that hold here say; "" where one says so, or none holds."""
    said = [one.differs(row, entry) for one in records if one.holds(row)] if entry else []
    return said[0] if all(said) and said else ""


def read(found: Sequence[Mapping[str, Any]], where: str) -> list[Recorded]:
    """The records of a case file. Raises UsageError for what is none."""
    return [convert(Recorded, dict(one), f"{where}: recorded") for one in found]


def of(
    rows: Iterable[Row], device: str, versions: Mapping[str, str], loose: Collection[str] = (), entered: bool = False
) -> Recorded:
    """The record of a case's rows; an implementation of which nothing was judged, or which has a new failure, is left
    out. `loose`: entries that allow `nondeterministic`, of which nothing is recorded; `entered`: what is new is being
    entered."""
    its = collections.defaultdict[str, list[Row]](list)
    for row in rows:
        its[row.implementation].append(row)
    failing: dict[str, dict[str, tuple[Class | None, float | None]]] = {}
    agreeing = []
    for name, found in sorted(its.items()):
        if any(r.new for r in found) and not entered:
            continue
        found = [r for r in found if r.known not in loose]
        if known := [r for r in found if r.failing]:
            failing[name] = {r.subject: (r.cls, finite(r.headroom, 4)) for r in known}
        elif any(r.judged for r in found):
            agreeing.append(name)
    public = {name: Version(versions[name]).public for name in PACKAGES if name in versions}
    return Recorded(device=device, versions=public, failing=failing, agreeing=tuple(agreeing))


def merged(before: Sequence[Recorded], now: Recorded) -> list[Recorded]:
    """The records of a case with those of `now` in the place of what there was of its implementations on its device."""
    kept = []
    for one in before:
        if one.device == now.device:
            failing = {name: found for name, found in one.failing.items() if name not in now.implementations}
            agreeing = tuple(name for name in one.agreeing if name not in now.implementations)
            one = msgspec.structs.replace(one, failing=failing, agreeing=agreeing)
        kept.append(one)
    kept = [one for one in [*kept, now] if one.implementations]
    kept.sort(key=lambda one: (one.device, min(one.implementations)))
    return kept if any(one.failing for one in kept) else []


def save(path: Path, now: Recorded) -> bool:
    """Put a record into a case file; whether that changed the file."""
    text = text_of(path, "case")
    data = decode(Any, text, str(path))
    if "case" not in data:
        data = {"case": data}
    whole = merged(read(data.get("recorded", ()), str(path)), now)
    found: list[dict[str, Any]] = msgspec.json.decode(msgspec.json.encode(whole))
    if found == list(data.get("recorded", ())):
        return False
    data.pop("recorded", None)
    head = json.dumps(data, indent=1, ensure_ascii=False)
    lines = ",\n".join(_lines(one) for one in found)
    write(path, head.removesuffix("\n}") + (f',\n "recorded": [\n{lines}\n ]' if found else "") + "\n}\n")
    return True


def _lines(one: Mapping[str, Any]) -> str:
    """A line for each field, and for each implementation that fails: a change of one is a change of one line."""
    fields = []
    for name, value in one.items():
        if name == "failing":
            inner = ",\n".join(f"    {json.dumps(i)}: {json.dumps(found)}" for i, found in value.items())
            fields.append(f'   "failing": {{\n{inner}\n   }}')
        else:
            fields.append(f"   {json.dumps(name)}: {json.dumps(value)}")
    return "  {\n" + ",\n".join(fields) + "\n  }"
