"""New entries of a ledger, written from what a run found: as narrow as the finding, its case frozen beside the ledger."""

import collections
import datetime
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from parity.case.case import Case
from parity.decoding import write
from parity.errors import UsageError
from parity.process import installed
from parity.results.ledger import Ledger
from parity.results.recorded import Recorded, save
from parity.results.report.findings import Finding
from parity.results.row import Row

CASES = "regressions"  # folder beside the ledger for the cases of its entries
AGREEING = 3
"""Rows that agree at a setting's default, from which a finding that has no case there is one of other values alone."""


def entry(
    case: Case,
    finding: Finding,
    library: str,
    reason: str,
    link: str,
    expires: datetime.date | None,
    sizes: Collection[str],
    defaults: Mapping[str, Any],
    agreeing: Iterable[Row],
) -> dict[str, Any]:
    """The fields of an entry that covers a finding and no more than its like; `case` is its smallest case. Scope: its
    implementations, the quantities, dtypes and devices in which it fails, the settings not at their default that all its
    cases share (`sizes` left out), the installed version of `library`, the class where all have one, and the size of
    the failure where it has one. A setting that has other values in each case, never its default, is `not` its default
    where `AGREEING` rows of the same run, within the rest of the scope, agree at that."""
    first, its = finding.lead, [part.first.settings for part in finding.parts]
    every = [r for f in finding.each for r in f.failing]
    where = {(r.dtype, r.device) for r in every}
    shared = {k: v for k, v in case.settings.items() if k not in sizes and all(k in s and s[k] == v for s in its)}
    beside = [r.settings for r in agreeing if (r.dtype, r.device) in where and shared.items() <= r.settings.items()]
    right = collections.Counter(name for settings in beside for name in defaults.keys() - settings.keys())
    away = {k for k in case.settings.keys() & defaults.keys() if all(k in s for s in its) and right[k] >= AGREEING}
    away -= {*shared, *sizes}
    failing = [r for f in finding.each for r in f.rows if r.failing]
    classes = {r.cls for r in failing} if {len(f.classes) for f in finding.each} == {1} else set()
    out: dict[str, Any] = {
        "id": re.sub(r"[^a-z0-9]+", "-", f"{first.implementation}-{first.subject}-{case.id}".lower()).strip("-"),
        "family": case.family,
        "implementations": [f.implementation for f in finding.each],
        "quantities": sorted({str(r.quantity) for r in every}),
        "verdicts": sorted({r.verdict for r in failing}),
        "dtypes": sorted({r.dtype for r in every}),
        "devices": sorted({r.device for r in every}),
        "settings": shared | {k: {"not": "none" if defaults[k] is None else defaults[k]} for k in sorted(away)},
        "versions": {library: f"=={version}"} if library and (version := installed(library)) else {},
        "reason": reason,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "case": f"{CASES}/{case.id}.json",
    }
    out |= {"link": link} if link else {"unlinked": "accepted as a baseline, not yet explained"}
    if len(classes) == 1 and first.cls:
        out["class"] = first.cls
    sizes_of = [r.headroom for r in every]
    if None not in sizes_of:
        out["headroom"] = max(size for size in sizes_of if size is not None)
    if expires is not None:
        out["expires"] = expires.isoformat()
    return out


def append(path: Path, entries: Sequence[tuple[dict[str, Any], Case, Recorded]], again: bool = False) -> list[str]:
    """Write entries behind those that a ledger has, each with its case and what that gave; their ids. With `again` those it
    has are left out. What cannot be read again never replaces the old one. Raises UsageError for an id that the ledger
    has."""
    ledger = Ledger.known(path if path.exists() else None)
    known = {e.id for e in ledger.entries}
    gave = [(path.parent / one["case"], record) for one, _, record in entries]
    entries = [new for new in entries if not again or new[0]["id"] not in known]
    for one, case, _ in entries:
        if case.tensors:
            raise UsageError(f"{path}: case {case.id} has stored tensors: put them and it beside the ledger by hand")
        if one["id"] in known:
            raise UsageError(f"{path}: id {one['id']!r} is there already: {ledger.line_of(one['id'])}")
        known.add(one["id"])
    text = path.read_text(encoding="utf-8") if path.exists() else "# Known findings\n"
    for one, case, _ in entries:
        target = path.parent / one["case"]
        if not target.exists():
            write(target, json.dumps(case.to_json(), indent=1) + "\n")
        text = text.rstrip("\n") + "\n\n" + toml(one)
    draft = path.with_name(f".{path.name}.draft")
    draft.write_text(text, encoding="utf-8")
    try:
        Ledger.load(draft)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    for target, record in gave:
        save(target, record)
    return [one["id"] for one, *_ in entries]


def toml(fields: Mapping[str, Any]) -> str:
    """An entry as TOML. Its strings and lists are written as JSON, which TOML reads alike."""
    lines = [f"{name} = {_value(value)}" for name, value in fields.items() if value not in ({}, [], "")]
    return "\n".join(["[[finding]]", *lines]) + "\n"


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{json.dumps(k)} = {_value(v)}" for k, v in value.items() if v is not None) + " }"
    return json.dumps(value, ensure_ascii=False, allow_nan=False).replace("\x7f", "\\u007F")
