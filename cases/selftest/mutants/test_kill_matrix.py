"""The whole kill matrix: every mutant of the losses and of the trainers dies, and no control does."""

import dataclasses

import pytest

from cases.selftest.mutants import trainers
from cases.selftest.mutants.matrix import PROFILE, stream_fates
from cases.selftest.mutants.mutant import FAMILIES, controls, mutants
from cases.selftest.slow import HOURS, number
from parity.case.profiles import cases_drawn

pytestmark = [pytest.mark.slow, pytest.mark.timeout(HOURS)]

FIRST = number("SEED", 0)
SEEDS = range(FIRST, FIRST + number("SEEDS", 1))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_losses(family, seed, device, record_property):
    """A stream is as long as the draws of a run of profile pr."""
    budget = number("CASES", cases_drawn(family, PROFILE))
    told(stream_fates(family, seed, budget, mutants(family), controls(family), device), record_property)


@pytest.mark.parametrize("family", trainers.EDITS)
def test_trainers(family, device, record_property):
    """The cases of a trainer are listed, not drawn: one seed is all there is to see."""
    told(trainers.fates(family, FIRST, number("CASES", 10**9), device), record_property)


def told(fates, record_property):
    record_property("mutants", [dataclasses.asdict(fate) for fate in fates])
    assert [f"{fate.name}: {fate.mistake or fate.message}" for fate in fates if not fate.right] == []
