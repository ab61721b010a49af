"""An entry written from a finding covers every case of it."""

import pytest
from msgspec import structs

from cases.selftest.results import runs
from parity.case.case import Case
from parity.results.ledger_edit import entry
from parity.results.report.findings import findings, grouped

SMALL = {"B": 2, "softcap": 30.0, "temperature": 0.5, "layout": "flat"}
"""Of the smallest case, which a run had no time to make smaller."""


def row(case, settings, quantity="logps", headroom=5.0):
    where = {"family": "logprobs", "implementation": "lib.f"}
    return runs.row(case, quantity, "disagree", gate="row", settings=settings, headroom=headroom, **where)


def written(*rows, agreeing=()):
    (found,) = findings(grouped(rows))
    defaults = {"softcap": None, "temperature": 1.0, "layout": "plain"}
    return entry(Case("logprobs", 1, "fp32", SMALL), found, "", "why", "lib.f", None, ("B",), defaults, agreeing)


def test_of_settings_only_those_that_all_its_cases_share():
    one, other = row("a", SMALL), row("b", {"B": 9, "T": 9, "softcap": 30.0, "temperature": 0.7})
    assert written(one)["settings"] == {"softcap": 30.0, "temperature": 0.5, "layout": "flat"}
    assert written(one, other)["settings"] == {"softcap": 30.0}


def test_a_setting_that_is_never_at_its_default_where_others_agree():
    """Else the same function may break at the default too, and nobody is told."""
    rows = [row("a", SMALL), row("b", SMALL | {"temperature": 0.7, "softcap": 5.0})]
    plain = [row(f"c{i}", {"layout": "flat", "softcap": 30.0}) for i in range(3)]
    assert written(*rows, agreeing=plain)["settings"] == {"layout": "flat", "temperature": {"not": 1.0}}
    assert written(*rows, agreeing=plain[:2])["settings"] == {"layout": "flat"}
    both = [row(f"c{i}", {"layout": "flat"}) for i in range(3)]
    assert written(*rows, agreeing=both)["settings"]["softcap"] == {"not": "none"}
    elsewhere = [row(f"c{i}", {}) for i in range(3)]  # another layout
    elsewhere += [structs.replace(r, dtype="bf16") for r in plain]
    assert written(*rows, agreeing=elsewhere)["settings"] == {"layout": "flat"}


@pytest.mark.parametrize(("size", "largest"), [(900.0, 900.0), (None, None)])
def test_as_large_as_anything_that_fails_in_its_cases(size, largest):
    gradient = row("b", SMALL | {"T": 9}, "grad_hidden", size)
    assert written(row("a", SMALL), row("b", SMALL | {"T": 9}), gradient).get("headroom") == largest
