"""Every frozen case through every implementation of its family; what the ledger knows is expected to fail."""

import functools
from pathlib import Path

import pytest

from parity import data
from parity.case.case import Frozen
from parity.registry import facts, run_case, select
from parity.results.ledger import Ledger
from parity.results.recorded import altered, read
from parity.results.report.render import text_of
from parity.results.row import Row
from parity.running.provenance import resolve_device


@functools.cache
def judged(path: Path, thorough: bool) -> list[Row]:
    """The case of a file through every implementation of its family, or those that the file names."""
    frozen = Frozen.load(path)
    case, only = frozen.case, frozen.implementations
    chosen = [i for i in select(only or ()) if i.family == case.family and (only is None or i.id in only)]
    return list(run_case(case, chosen, resolve_device("auto"), thorough=thorough))


@pytest.mark.parametrize("path", data.frozen_cases(), ids=lambda p: p.stem)
def test_frozen(path: Path) -> None:
    frozen = Frozen.load(path)
    case, rows = frozen.case, judged(path, not frozen.fast)
    absent = [r.message for r in rows if r.verdict == "unsupported" and "is not installed" in r.message]
    if absent and len(absent) == len(rows):
        pytest.skip(absent[0])
    ledger = Ledger.load(data.ledger_file())
    entries = {e.id: e for e in ledger.entries}
    records = read(frozen.recorded, path.name)
    for row in rows:
        entry = entries.get(ledger.match(row, facts(case)) or "") if row.failing else None
        assert not altered(row, entry, records), f"{row.implementation}: {altered(row, entry, records)}"
    new = [r for r in rows if r.failing and ledger.match(r, facts(case)) is None]
    assert not new, "\n".join(text_of([r for r in rows if r.implementation == new[0].implementation]).splitlines())
    settled = ("agree", "disagree", "refused")
    assert any(r.verdict in settled or ledger.match(r, facts(case)) for r in rows), "nothing was judged"


@pytest.mark.parametrize("entry", Ledger.load(data.ledger_file()).entries, ids=lambda e: e.id)
def test_ledger_entry_still_reproduces(entry) -> None:
    if not entry.in_force() or (entry.devices and resolve_device("auto") not in entry.devices):
        scope = f"versions {dict(entry.versions)}, devices {entry.devices or 'all'}"
        pytest.skip(f"{entry.id}: out of scope here ({scope})")
    path = data.cases_dir() / entry.case
    frozen = Frozen.load(path)
    deep = any(q.startswith(("protocol", "relation")) for q in entry.quantities)
    rows = [r for r in judged(path, deep or not frozen.fast) if entry.covers_implementation(r.implementation)]
    ledger = Ledger((entry,), data.ledger_file())
    known = {r.implementation for r in rows if r.failing and ledger.match(r, facts(frozen.case))}
    ran = {r.implementation for r in rows if r.verdict != "unsupported"}
    assert known == ran and known
