"""The ledger of known findings. A run stays green on them, lists them apart, and turns red when one stops happening.

An entry has a scope, so that it hides nothing beside it: implementations and quantities (with `*`), settings and
features of the case, dtypes, devices, verdicts, and versions of the libraries. Its own frozen case is what tells whether
it still holds; random draws never make an entry stale.
"""

from __future__ import annotations

import dataclasses
import datetime
import fnmatch
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta
from packaging.specifiers import InvalidSpecifier, SpecifierSet

from parity import data
from parity.decoding import convert, text_of, toml_of
from parity.errors import UsageError
from parity.process import installed
from parity.results.row import Class, Row, Verdict

if TYPE_CHECKING:
    from parity.case.case import Case
Severity = Literal["high", "medium", "low", "convention"]
SEVERITIES: dict[Severity, str] = {
    "high": "default or common settings",
    "medium": "settings that recipes of today use, or a crash, or logs alone",
    "low": "extremes",
    "convention": "a choice of the library, not counted as a defect",
}
"""By what a recipe of today meets, most severe first."""


class ForUser(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A finding in the terms of a user of the library. An entry that is `part_of` another has no line of its own.
    `applies` lists alternatives, each a table of settings of a training run: "trainer" and "loss_type" take lists of
    names, "model" and "uses" lists of words of which one must occur, the name of a library a version
    specifier, numbers a table with `min`, `max` or `not`; all of a table must hold. What no setting shows is in
    `only_if`. `rank` orders the lines, `since` is the release that brought it, where that was bisected or read."""

    part_of: str = ""
    when: str = ""
    effect: str = ""
    fix: str = ""
    since: str = ""
    only_if: str = ""
    rank: int = 99
    applies: tuple[dict[str, Any], ...] = ()

    def __post_init__(self) -> None:
        for name in (n for table in self.applies for n in ("trainer", "model", "uses") if n in table):
            if not all(isinstance(table.get(name, []), list) for table in self.applies):
                raise ValueError(f"applies: {name} takes a list of names")


GROWTH = 3.0
"""A known finding may be so many times as large as when it was entered; beyond that it is a new one. A CPU without AVX-512, and
one without AVX, changed none on its frozen case by more than 1.4 (precision: 1.05)."""

OLDER = "ledger-older.toml"
"""Beside the ledger: findings that a newer release has mended, for runs with an older one. Its entries tell users nothing."""

Device = Literal["cpu", "cuda"]
Text = Annotated[str, Meta(min_length=1)]
Texts = Annotated[tuple[Text, ...], Meta(min_length=1)]


class Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename={"cls": "class"}):
    """A known finding. Scope fields that are empty hold for everything; `family` may be a pattern ("*-trainer").

    `settings` maps a setting, a feature or `products` (`parity.registry.facts`) to a value, a list of values, or a
    table with `min`, `max` or `not`; one that is absent is "none". `variants` are names of definitions other than the
    oracle's: a row is inside when one of them explains all that failed with it. `cls`, in the file "class", is the
    class of the disagreement. `headroom` is how large it was: a row of more than `GROWTH` times as much, or of no
    finite size, is not covered (of a trainer's check under another seed, whose values are others, one of no finite size
    alone). A finding whose size its case decides has none, and is held on its frozen case alone
    (`parity.results.recorded`). `link` says where it is discussed, or `unlinked` why nowhere. From the day `expires` on
    (2026-12-31) the entry must be looked at again, and turns a run red until it is. `rests_on` are devices on whose
    rounding or code path its case rests: elsewhere it may agree, and is not stale.
    """

    id: Text
    family: Text
    implementations: Texts
    quantities: Texts
    reason: Text
    date: Text
    case: Text
    link: str = ""
    unlinked: str = ""
    expires: str = ""
    headroom: Annotated[float, Meta(ge=0)] | None = None
    settings: dict[str, Any] = {}
    dtypes: tuple[Literal["fp32", "bf16", "fp16"], ...] = ()
    devices: tuple[Device, ...] = ()
    rests_on: tuple[Device, ...] = ()
    verdicts: tuple[Verdict, ...] = ("disagree",)
    versions: dict[str, str] = {}
    gates: tuple[str, ...] = ()
    variants: tuple[str, ...] = ()
    cls: Class | None = None
    severity: Severity | None = None
    user: ForUser = ForUser()

    def covers_implementation(self, implementation: str) -> bool:
        return any(fnmatch.fnmatchcase(implementation, p) for p in self.implementations)

    def in_force(self, versions: Mapping[str, str] | None = None) -> bool:
        """Whether these versions, by default the installed ones, are inside the entry's scope."""
        version_of = installed if versions is None else versions.get
        return all(
            (version := version_of(name)) is not None and version in SpecifierSet(specifier, prereleases=True)
            for name, specifier in self.versions.items()
        )

    def covers(self, row: Row, facts: Mapping[str, Any]) -> bool:
        """Whether a failing row is this finding; `facts` are all settings and features of its case."""
        # What products have under autocast too: findings of float16 there are those of float16 inputs.
        products = "fp16" if facts.get("products") == "fp16" else None
        return (
            fnmatch.fnmatchcase(row.family, self.family)
            and row.verdict in self.verdicts
            and self.covers_implementation(row.implementation)
            and any(fnmatch.fnmatchcase(str(row.quantity), p) for p in self.quantities)
            and (not self.dtypes or not {row.dtype, products}.isdisjoint(self.dtypes))
            and (not self.devices or row.device in self.devices)
            and (not self.gates or row.gate in self.gates)
            and (not self.variants or row.variant in self.variants)
            and self.cls in (None, row.cls)
            and self._as_large(row)
            and all(holds(facts.get(name), wanted) for name, wanted in self.settings.items())
            and self.in_force()
        )

    def _as_large(self, row: Row) -> bool:
        if self.headroom is None or row.headroom is None:
            return self.headroom is None
        return row.headroom <= GROWTH * self.headroom or ("check" in row.settings and row.seed != 0)


def holds(value: Any, wanted: Any) -> bool:
    """Whether a value is the wanted one, one of a list, or within a table of `min`, `max` or `not`."""
    value = "none" if value is None else value  # TOML has no null
    if isinstance(wanted, dict):
        limited = bool({"min", "max"} & wanted.keys())
        inside = isinstance(value, int | float) and wanted.get("min", value) <= value <= wanted.get("max", value)
        return (inside or not limited) and not ("not" in wanted and value == wanted["not"])
    if isinstance(wanted, list):
        return value in wanted
    return bool(value == wanted)


@dataclasses.dataclass(frozen=True)
class Ledger:
    """Every entry, and where it was read; `own`: a user's file, whose entries follow those of `path`."""

    entries: tuple[Entry, ...]
    path: Path
    own: Path | None = None

    @property
    def folder(self) -> Path:
        """Where the cases of its entries are, by paths relative to it; those of `own` are absolute."""
        return self.path.parent

    @classmethod
    def known(cls, own: Path | None = None) -> Ledger:
        """The shipped ledger and a user's own, unless that says `alone = true`. Raises UsageError for a ledger that
        `load` refuses, and an id that both have."""
        shipped = data.ledger_file()
        if own is None or own.resolve() == shipped.resolve():
            return cls.load(shipped)
        if _read(own).alone:
            return cls.load(own)
        both, place = cls.load(shipped), own.resolve().parent
        mine = [msgspec.structs.replace(e, case=str(place / e.case)) for e in cls.load(own).entries]
        if double := {e.id for e in both.entries} & {e.id for e in mine}:
            raise UsageError(f"{own}: the shipped ledger, which it adds to, has {min(double)!r} too: rename it")
        return cls((*both.entries, *mine), shipped, own)

    @classmethod
    def load(cls, path: Path) -> Ledger:
        """Read a ledger file, and of `OLDER` beside it the entries that are in force with what is installed. Raises
        UsageError for an entry without a mandatory field, with an unknown one, or whose case does not exist."""
        entries = _entries(path)
        entries += [e for e in cls.older(path) if e.in_force()]
        ids = [e.id for e in entries]
        for double in {i for i in ids if ids.count(i) > 1}:
            raise UsageError(f"{path}: id {double!r} is used twice")
        return cls(tuple(entries), path)

    @staticmethod
    def older(path: Path) -> list[Entry]:
        """The entries of `OLDER` beside a ledger, in force or not."""
        older = path.with_name(OLDER)
        return _entries(older) if older.exists() and older != path else []

    def expired(self, today: datetime.date) -> list[str]:
        """A line for each entry that must be looked at again, with the place to edit."""
        late = [e for e in self.entries if e.expires and datetime.date.fromisoformat(e.expires) <= today]
        return [f"ledger entry {e.id} expired on {e.expires}: {self.line_of(e.id)}" for e in late]

    def unmatched(self, ids: Collection[str]) -> list[str]:
        """A line for each entry of which a pattern names none of the implementations; those of files are not all there always."""
        return [
            f"ledger entry {e.id}: there is no implementation {pattern}: {self.line_of(e.id)}"
            for e in self.entries
            for pattern in e.implementations
            if ".py:" not in pattern and not fnmatch.filter(ids, pattern)
        ]

    def line_of(self, id: str) -> str:
        """`ledger.toml line 12` of an entry."""
        for path in (self.path, self.path.with_name(OLDER), *([self.own] if self.own else [])):
            lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
            for number, line in enumerate(lines, 1):
                name, sign, value = line.partition("=")
                if sign and name.strip() == "id" and value.strip().strip("\"'") == id:
                    return f"{path} line {number}"
        return str(self.path)

    def match(self, row: Row, facts: Mapping[str, Any]) -> str | None:
        """The id of the entry that a failing row falls under, or None; `facts` of its case: see `parity.registry.facts`."""
        return next((e.id for e in self.entries if e.covers(row, facts)), None)

    def frozen(self) -> list[tuple[Entry, Case]]:
        from parity.case.case import Case  # imports torch, which takes seconds

        return [(e, Case.load(self.folder / e.case)) for e in self.entries]


class _File(msgspec.Struct, forbid_unknown_fields=True):
    finding: list[dict[str, Any]] = []
    alone: bool = False


def _read(path: Path) -> _File:
    return convert(_File, toml_of(text_of(path, "ledger"), str(path), "ledger"), str(path))


def _entries(path: Path) -> list[Entry]:
    return [_entry(raw, path) for raw in _read(path).finding]


def _entry(raw: dict[str, Any], path: Path) -> Entry:
    name = raw.get("id", "an entry without id")
    where = f"{path}: {name}"
    for field in ("date", "expires"):
        if isinstance(raw.get(field), datetime.date):  # TOML has dates, with and without quotes
            raw = raw | {field: raw[field].isoformat()}
    entry: Entry = convert(Entry, raw, where)
    if not entry.link and not entry.unlinked:
        raise UsageError(f"{where}: link is mandatory, or unlinked with the reason why there is none")
    try:
        datetime.date.fromisoformat(entry.expires or "9999-12-31")
    except ValueError:
        raise UsageError(f"{where}: expires {entry.expires!r} is not a date, write for example 2026-12-31") from None
    if not os.path.exists(path.parent / entry.case):  # not Path.exists: a name may be too long for a file
        raise UsageError(f"{where}: its case {entry.case} does not exist")
    for specifier in entry.versions.values():
        try:
            SpecifierSet(specifier)
        except InvalidSpecifier:
            raise UsageError(f"{where}: versions {specifier!r} is not a version specifier") from None
    for setting, wanted in entry.settings.items():
        for word in wanted.keys() - {"min", "max", "not"} if isinstance(wanted, dict) else ():
            raise UsageError(f"{where}: settings.{setting}: {word!r} is unknown, choose from min, max, not")
        limits = [wanted.get(word, 0) for word in ("min", "max")] if isinstance(wanted, dict) else []
        if not all(isinstance(limit, int | float) for limit in limits):
            raise UsageError(f"{where}: settings.{setting}: min and max are numbers")
    return entry


def stale(entry: Entry, rows: Sequence[Row], device: str) -> bool | None:
    """Whether the rows of an entry's own case all agree where the entry says they do not; None: it was not evaluated."""
    if not entry.in_force() or (entry.devices and device not in entry.devices):
        return None
    its = [r for r in rows if entry.covers_implementation(r.implementation)]
    if any(r.verdict in entry.verdicts for r in its):
        return False
    agreeing = [str(r.quantity) for r in its if r.verdict == "agree"]
    elsewhere = entry.rests_on and device not in entry.rests_on
    return True if not elsewhere and any(fnmatch.filter(agreeing, p) for p in entry.quantities) else None
