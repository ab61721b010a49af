"""Controls on drawn cases: none disagrees, a few here, many in the soak."""

import math
import tomllib
from pathlib import Path

import pytest

from cases.selftest.controls.correct import CONTROLS
from cases.selftest.controls.soak import drawn, page, rows, soak
from cases.selftest.slow import HOURS, number
from parity.case.case import Case
from parity.registry import loss_family


def affordable(cases):
    """Cases small enough for a test; the soak has the others."""
    small = [c for c in cases if c.settings.get("context") != "compile" and logits(c) <= 1 << 14]
    return [c for c in small if c.settings.get("V", 7) <= 1025]


def logits(case):
    family = loss_family(case.family)
    return math.prod(family.sizes(family.full_settings(case)))


@pytest.mark.parametrize("name", sorted(CONTROLS))
def test_no_control_disagrees(name):
    cases = affordable(drawn(name, 30, 2026))
    found = soak(cases)
    assert found.alarms == []
    assert found.total > 0.8 * len(cases) * len(CONTROLS[name])
    assert len({dtype for _, dtype in found.judged}) == 3
    assert len(found.first) <= found.total / 100, "even before confirmation"  # one in a thousand in a soak
    text = page([*rows(found), [1, 0, 2]])
    assert text.startswith(f"{found.total + 1:,} implementation-cases, ") and f"| {name} | row | " in text
    assert " 2 false alarms" in text


@pytest.mark.slow
@pytest.mark.timeout(HOURS)
@pytest.mark.parametrize("name", sorted(CONTROLS))
def test_no_control_disagrees_in_the_soak(name, device, record_property):
    cases = list(drawn(name, number("CASES", 600), number("SEED", 0)))
    found = soak(cases, device=device)
    record_property("false alarms", rows(found))
    assert found.alarms == []
    assert found.total > 0.7 * len(cases) * len(CONTROLS[name]), found.silent.most_common(10)


def test_the_draws_are_different_cases():
    """Hypothesis follows a fresh example by mutated copies; most draws of a soak must be fresh."""
    cases = list(drawn("policy", 120, 1))
    assert len({c.id for c in cases}) == 120
    assert len({c.seed for c in cases}) > 60
    assert len({c.settings.get("loss_type", "grpo") for c in cases}) == 8
    assert [c.id for c in drawn("policy", 120, 1)] == [c.id for c in cases]


ALARMED = {
    what: Case(*fields)
    for what, fields in tomllib.loads(Path(__file__).with_name("alarmed.toml").read_text(encoding="utf-8")).items()
}


@pytest.mark.parametrize("case", ALARMED.values(), ids=ALARMED)
def test_cases_that_alarmed(case):
    found = soak([case])
    assert not found.alarms and found.total >= 4, found.alarms
