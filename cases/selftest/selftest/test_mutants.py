"""The kill matrix on one stream: every mutant dies by a named gate, and no control does."""

from __future__ import annotations

import pytest

from parity.selftest.mutants import FAMILIES, controls, mutants, table
from parity.selftest.mutants.matrix import Fate, stream_fates

CASES = {"logprobs": 45, "policy": 115, "divergence": 45}
"""Cases of the short form: by then the mutants outside `LATE` are dead."""
LATE: dict[str, frozenset[str]] = {
    "logprobs": frozenset({"nan-hidden"}),
    "policy": frozenset({"off-policy-zero", "strides-of-lora_a", "strides-of-lora_b", "vespo-unclamped"}),
    "divergence": frozenset({"maximum-from-zero"}),
}
"""Mutants left out: they need more cases, the whole matrix kills them (docs/sensitivity.md)."""


@pytest.fixture(scope="module", params=FAMILIES)
def fates(request: pytest.FixtureRequest) -> list[Fate]:
    family = request.param
    chosen = [m for m in mutants(family) if m.name not in LATE[family]]
    return stream_fates(family, 0, CASES[family], chosen, controls(family)[:3])


def test_every_mutant_is_killed(fates: list[Fate]) -> None:
    assert [f"{fate.name}: {fate.mistake}" for fate in fates if fate.mistake and not fate.killed] == []


def test_every_control_lives(fates: list[Fate]) -> None:
    alarms = [f"{f.name}: {f.quantity} by {f.gate} on {f.case}" for f in fates if not f.mistake and f.killed]
    assert alarms == []
    assert all(fate.judged > 0 for fate in fates if not fate.mistake)


def test_mutants_are_at_least_sixty_and_told_apart() -> None:
    found = [m for family in FAMILIES for m in mutants(family)]
    assert len(found) >= 60
    assert len({m.implementation.id for m in found}) == len(found)
    assert all(m.mistake for m in found)


def test_lines_count_streams_and_name_the_commonest_gate() -> None:
    dead = Fate("policy", "m", "a mistake", 0, 4, 9, "row", "loss", "fp32", "", None)
    alive = Fate("policy", "m", "a mistake", 1, 50, 90)
    control = Fate("policy", "c", "", 0, 50, 90)
    survivor, living = table.lines([dead, alive, control])
    assert (survivor.killed, survivor.streams, survivor.gate, survivor.right) == (1, 2, "row", False)
    assert living.right
    assert table.summary([survivor, living]) == "0 of 1 mutants killed on every stream, 1 of 1 controls alive"
