"""What a frozen case gave when it was measured, and what differs from that."""

import json

import pytest
import torch
from msgspec.structs import replace

from cases.selftest.results import runs
from parity import data
from parity.case.case import Case, Frozen
from parity.process import installed
from parity.registry import family, load
from parity.results.ledger import Entry, Ledger
from parity.results.recorded import merged, of, read, save
from parity.running.plan import frozen_files
from parity.trainers import catalogue

TOLD = {"id": "x", "family": "logprobs", "reason": "r", "date": "d", "case": "c.json"}
ENTRY = Entry(**TOLD, implementations=("lib.*",), quantities=("*",))


def row(**changes):
    base = {"verdict": "disagree", "family": "logprobs", "implementation": "lib.f", "known": "x"}
    return runs.row("c", **base | {"cls": "precision", "headroom": 10.0} | changes)


BEFORE = of([row(), row(quantity="kl", headroom=None, cls="logic")], "cpu", {"torch": "2.0+cpu", "numpy": "1.0"})


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, ""),
        ({"headroom": 30.0}, ""),
        ({"headroom": 30.1}, "headroom 30.1, which was 10"),
        ({"headroom": None}, "headroom inf, which was 10"),
        ({"cls": "logic"}, "class logic, which was precision"),
        ({"cls": None, "verdict": "nondeterministic"}, ""),
        ({"quantity": "entropy"}, "entropy fails, which it did not (only loss, kl)"),
        ({"quantity": None, "verdict": "crashed"}, "crashed fails, which it did not (only loss, kl)"),
        ({"quantity": "kl", "cls": "logic", "headroom": None}, ""),
    ],
)
def test_what_grew_changed_its_class_or_shows_in_another_quantity_differs(changes, told):
    assert BEFORE.differs(row(**changes), ENTRY) == told


def test_what_memory_held_is_not_recorded():
    flaky = replace(ENTRY, verdicts=("disagree", "nondeterministic"))
    assert BEFORE.differs(row(headroom=1e9), flaky) == BEFORE.differs(row(quantity="entropy"), flaky) == ""
    assert of([row(), row(quantity="kl", known="y")], "cpu", {}, loose={"x"}).failing == {
        "lib.f": {"kl": ("precision", 10.0)}
    }


def test_an_implementation_that_agreed_may_not_fail():
    agreed = of([row(verdict="agree", known=None)], "cpu", {})
    assert agreed.agreeing == ("lib.f",) and agreed.differs(row(), ENTRY) == "loss fails, which it did not"


def test_it_holds_on_its_device_with_its_versions_or_newer_ones():
    here = installed("torch")
    assert BEFORE.versions == {"torch": "2.0"} and BEFORE.holds(row())
    assert not BEFORE.holds(row(device="cuda"))
    assert not BEFORE.holds(row(implementation="lib.other"))
    assert replace(BEFORE, versions={"torch": here}).holds(row())
    assert not replace(BEFORE, versions={"torch": "999"}).holds(row())
    assert replace(BEFORE, versions={"no-such-package": "999"}).holds(row())


def test_what_is_new_is_not_recorded_unless_it_is_being_entered():
    rows = [row(known=None), row(quantity="kl")]
    assert of(rows, "cpu", {}).implementations == set()
    assert set(of(rows, "cpu", {}, entered=True).failing["lib.f"]) == {"loss", "kl"}
    assert of([row(verdict="refused", quantity=None, known=None)], "cpu", {}).implementations == set()


def test_a_case_file_keeps_what_other_devices_and_implementations_gave(tmp_path):
    path, case = tmp_path / "c.json", family("logprobs").case(1, "fp32", {})
    path.write_text(json.dumps(case.to_json()))
    other = of([row(implementation="lib.g")], "cpu", {})
    cuda = of([row(device="cuda", headroom=5.0)], "cuda", {})
    again = of([row(headroom=12.345678)], "cpu", {"torch": "2.1"})
    assert [save(path, one) for one in (BEFORE, BEFORE, other, cuda, again)] == [True, False, True, True, True]
    assert Case.load(path) == case
    found = read(Frozen.load(path).recorded, "c.json")
    assert [(r.device, r.versions, sorted(r.implementations)) for r in found] == [
        ("cpu", {"torch": "2.1"}, ["lib.f"]),
        ("cpu", {}, ["lib.g"]),
        ("cuda", {}, ["lib.f"]),
    ]
    assert found[0].failing == {"lib.f": {"loss": ("precision", 12.35)}}
    assert merged([BEFORE], of([row(verdict="agree", known=None)], "cpu", {})) == []


def test_every_entry_of_this_ledger_was_measured_where_it_is_in_force():
    without = []
    for entry in Ledger.load(data.ledger_file()).entries:
        there = read(Frozen.load(data.cases_dir() / entry.case).recorded, entry.case)
        known = {i for one in there for i in one.failing}
        loose = "nondeterministic" in entry.verdicts or (entry.devices == ("cuda",) and not torch.cuda.is_available())
        if entry.in_force() and not loose and not any(map(entry.covers_implementation, known)):
            without.append(entry.id)
    assert without == []


def test_what_was_recorded_is_of_implementations_that_there_are():
    there = {*load(), *catalogue.implementations()}
    for name, path in frozen_files(Ledger.known()).items():
        records = read(Frozen.load(path).recorded, name)
        assert {i for one in records for i in one.implementations} <= there, name
        assert not records or any(one.failing for one in records), name
