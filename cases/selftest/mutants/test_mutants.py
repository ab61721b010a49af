"""The kill matrix, on one stream or, as a slow test, whole: every mutant dies by a named gate, and no control does."""

from __future__ import annotations

import ast
import builtins
import dataclasses
import importlib
import tomllib
from pathlib import Path

import pytest

from cases.selftest.mutants import steps, trainers
from cases.selftest.mutants.matrix import PROFILE, Fate, page, stream_fates
from cases.selftest.mutants.mutant import FAMILIES, controls, mutants
from cases.selftest.slow import HOURS, number
from parity.case.profiles import cases_drawn

CASES = {"logprobs": 45, "policy": 115, "divergence": 45, "preference": 54}
SHARE = 5
"""The short form: one mutant in so many, dead within these cases."""
FIRST = number("SEED", 0)
SEEDS = range(FIRST, FIRST + number("SEEDS", 1))


@pytest.fixture(scope="module", params=FAMILIES)
def fates(request: pytest.FixtureRequest) -> list[Fate]:
    family = request.param
    return stream_fates(family, 0, CASES[family], mutants(family)[::SHARE], controls(family)[:3])


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


@pytest.mark.parametrize("family", FAMILIES)
def test_every_name_in_the_table_is_known(family: str) -> None:
    """A mutant that only raises NameError would count as caught."""
    module = importlib.import_module(f"cases.selftest.mutants.{family}")
    known = {*vars(builtins), *vars(steps.logprobs), *vars(steps), *vars(module)}
    used, bound = set[str](), set[str]()
    for row in tomllib.loads(Path(steps.__file__).with_name("losses.toml").read_text())[family].values():
        for text in (text for step, text in row.items() if step != "mistake"):
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.Name):
                    (used if isinstance(node.ctx, ast.Load) else bound).add(node.id)
                if isinstance(node, ast.arg):
                    bound.add(node.arg)
    parameters = {*"x c z hidden logps entropy value index lp lq beta per_token loss".split()}
    assert used - bound - parameters - known == set()
    helpers = {n for n, f in vars(module).items() if n[0] == "_" and getattr(f, "__module__", "") == module.__name__}
    nodes = ast.walk(ast.parse(Path(module.__file__).read_text()))
    named = used | {node.id for node in nodes if isinstance(node, ast.Name)}
    assert helpers - named == set(), "nothing uses them"


@pytest.mark.parametrize("family", trainers.EDITS)
def test_every_edit_of_a_trainer_is_one_of_the_installed_release(family: str) -> None:
    for edit in trainers.EDITS[family]:
        assert issubclass(trainers.mutated(family, edit), trainers.released(family))


def test_the_page_counts_streams_and_names_survivors() -> None:
    dead = Fate("policy", "m", "a mistake", 0, 4, 9, "row", "loss", "fp32", "", None)
    alive = Fate("policy", "m", "a mistake", 1, 50, 90)
    control = Fate("policy", "c", "", 0, 50, 90)
    text = page(dataclasses.asdict(fate) for fate in (dead, alive, control))
    assert "| policy | 2 | 1 | 4 | 4 | 4 | 1 | 0 |" in text and "| row | 1 |" in text
    counts = "1 of 2 mutants caught, 1 survived; 1 of 1 controls never called wrong"
    assert text.endswith(f"policy m, seed 1: a mistake\n{counts}")


@pytest.mark.slow
@pytest.mark.timeout(HOURS)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_losses(family, seed, device, record_property):
    """A stream is as long as the draws of a run of profile pr."""
    budget = number("CASES", cases_drawn(family, PROFILE))
    told(stream_fates(family, seed, budget, mutants(family), controls(family), device), record_property)


@pytest.mark.slow
@pytest.mark.timeout(HOURS)
@pytest.mark.parametrize("family", trainers.EDITS)
def test_trainers(family, device, record_property):
    """The cases of a trainer are listed, not drawn: one seed is all there is to see."""
    told(trainers.fates(family, FIRST, number("CASES", 10**9), device), record_property)


def told(fates, record_property):
    record_property("mutants", [dataclasses.asdict(fate) for fate in fates])
    assert [f"{fate.name}: {fate.mistake or fate.message}" for fate in fates if not fate.right] == []
