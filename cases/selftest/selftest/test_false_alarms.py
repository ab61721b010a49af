"""Honest implementations on drawn cases: none disagrees. The long form is `python -m parity.selftest.false_alarms`."""

import pytest

from parity.selftest.controls import CONTROLS
from parity.selftest.false_alarms import drawn, soak, table


def affordable(cases):
    """Cases small enough for a test; the soak has the others."""
    return [c for c in cases if c.settings.get("V", 7) <= 1025 and c.settings.get("context") != "compile"]


@pytest.mark.parametrize("name", sorted(CONTROLS))
def test_no_honest_implementation_disagrees(name):
    cases = affordable(drawn(name, 60, 2026))
    found = soak(cases)
    assert found.alarms == []
    assert found.total > 0.8 * len(cases) * len(CONTROLS[name])
    assert len({dtype for _, dtype in found.judged}) == 3
    assert max(spread.worst for spread in found.spreads.values()) < 2.0, "even before confirmation"
    assert "| row |" in table(found)


def test_the_draws_are_different_cases():
    """Hypothesis follows a fresh example by mutated copies; most draws of a soak must be fresh."""
    cases = list(drawn("policy", 120, 1))
    assert len({c.id for c in cases}) == 120
    assert len({c.seed for c in cases}) > 60
    assert len({c.settings.get("loss_type", "grpo") for c in cases}) == 8
    assert [c.id for c in drawn("policy", 120, 1)] == [c.id for c in cases]
