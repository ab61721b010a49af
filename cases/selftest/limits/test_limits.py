"""Limits of detection: the search finds the size it should, the table counts as it says, one case is measured for real."""

import dataclasses
import math
from pathlib import Path

import pytest

from cases.selftest.limits import limits
from cases.selftest.limits.limits import DTYPES, GRID, LOGITS, NEVER, DetectionLimit
from cases.selftest.oracles import oracle_of
from cases.selftest.slow import HOURS, number
from parity.case.profiles import cases_drawn
from parity.registry import NAMES, family


@pytest.mark.parametrize("size", [GRID[0], GRID[5], 1e-3, 0.3, 1.0])
def test_the_search_finds_the_first_error_that_is_caught(size):
    found = limits.smallest(lambda error: error >= size)
    assert found >= size
    assert found <= size * 2 ** (1 / limits.STEPS) * (1 + 1e-12)


def test_an_error_that_never_is():
    assert limits.smallest(lambda error: False) == NEVER


def found(limit: float) -> DetectionLimit:
    return DetectionLimit("policy", "fp32", "fp32 logits", "gradients", limit)


def page(drawn: int, *ones: DetectionLimit) -> str:
    return limits.page([drawn, *dataclasses.astuple(one)] for one in ones)


def test_ninety_nine_percent_of_one_case_and_of_a_run():
    own = [found(2.0**-k) for k in range(100)]
    values = [one.limit for one in own]
    assert limits.quantile(values, 0.99) == 2.0**-1
    assert limits.quantile(values, 0.5) == 2.0**-50
    count = limits.cases_of_a_run(own, 100)
    assert count == round(cases_drawn("policy", "pr") / 3)
    caught = sum(v <= limits.by_a_run(own, 100) for v in values) / 100
    assert 1 - (1 - caught) ** count >= 0.99
    fewer = sum(v < limits.by_a_run(own, 100) for v in values) / 100
    assert 1 - (1 - fewer) ** count < 0.99


def test_the_page_has_a_row_for_each_group():
    assert "| policy | gradients | fp32 | 0.001 | 0.001 |" in page(1, found(1e-3))
    assert "| beyond 1 | 0.001 |" in page(3, found(1e-3), found(NEVER), found(NEVER))


CASE = {"B": 2, "T": 4, "V": 9, "H": 6, "peak": 1.0}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_one_case_is_measured_and_its_limits_mean_what_they_say(dtype):
    case = family("logprobs").case(3, dtype, CASE)
    oracle = oracle_of(case)
    by_target = {one.target: one for one in limits.measure("logprobs", dtype, "fp32 logits", oracle)}
    assert set(by_target) == {"log-probs", "gradients"}
    honest = limits.implementation("logprobs", "reordered")
    values = limits.again(oracle, honest)
    limit = by_target["log-probs"].limit
    below = limit / 2 ** (1 / limits.STEPS)
    assert limits.caught(oracle, honest, limits.scaled(values, ("logps",), limit), ["logps"])
    assert not limits.caught(oracle, honest, limits.scaled(values, ("logps",), below), ["logps"])
    assert math.isfinite(by_target["gradients"].limit)


def test_the_gradient_of_a_float32_head_does_not_stand_for_a_narrow_one():
    case = family("logprobs").case(3, "bf16", CASE | {"head_dtype": "fp32"})
    found = limits.measure("logprobs", "bf16", "fp32 logits", oracle_of(case))
    assert [one.target for one in found] == ["log-probs"]


def test_a_policy_loss_is_edited_inside_where_its_log_probs_are_meant():
    case = family("policy").case(5, "fp32", CASE)
    oracle = oracle_of(case)
    plain, edited = (limits.again(oracle, limits.implementation("policy", "reordered", e)) for e in (0.0, 0.1))
    assert not math.isclose(float(plain["loss"]), float(edited["loss"]), rel_tol=1e-4)
    targets = [one.target for one in limits.measure("policy", "fp32", "fp32 logits", oracle)]
    assert targets == ["loss", "log-probs", "gradients"]


def test_drawn_cases_are_of_the_dtype_and_outside_autocast():
    cases = list(limits.drawn("logprobs", "fp32", 20, 0))
    assert len(cases) == 20
    assert {c.dtype for c in cases} == {"fp32"}
    assert all(c.settings.get("context") in (None, "checkpoint") for c in cases)
    assert cases[0].id == next(iter(limits.drawn("logprobs", "fp32", 1, 0))).id


PAGE = Path(__file__).parents[3] / "docs" / "sensitivity.md"


def shown():
    """(family, error, dtype, kind of logits) -> the ε that half of the cases catch, by the page."""
    rows = [line.strip("| ").split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    for of, target, dtype, half, _ in (row for row in rows if len(row) == 5 and row[0] in NAMES):
        name = dtype.split(",")[0]
        yield (of, target, name, list(LOGITS)[dtype != name]), float(half)


@pytest.mark.slow
@pytest.mark.timeout(HOURS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_the_limits_are_those_of_the_page(name, dtype, device, record_property):
    count, measured = number("CASES", 120), []
    for case in limits.drawn(name, dtype, count, number("SEED", 0)):
        oracle = oracle_of(case, device)
        for kind in list(LOGITS)[: 1 if dtype == "fp32" else None]:
            measured += limits.measure(name, dtype, kind, oracle)
    record_property("limits", [[count, *dataclasses.astuple(one)] for one in measured])
    expected = {key: half for key, half in shown() if key[0] == name and key[2] == dtype}
    halves = {key: limits.quantile([one.limit for one in group], 0.5) for key, group in limits.groups(measured).items()}
    assert {key: halves[key] for key, half in expected.items() if halves[key] > 2 * half} == {}
