"""Detection limits: the search finds the size it should, the table counts as it says, one case is measured for real."""

from __future__ import annotations

import math
import xml.etree.ElementTree

import pytest

from parity.registry import family, loss_family, oracle_of
from parity.selftest.sensitivity import measure, plot, table
from parity.selftest.sensitivity.measure import GATES, GRID, JUDGES, NEVER, DetectionLimit


@pytest.mark.parametrize("size", [GRID[0], GRID[5], 1e-3, 0.3, 1.0])
def test_the_search_finds_the_first_error_that_is_caught(size):
    found = measure._smallest(lambda error: error >= size)
    assert found >= size
    assert found <= size * 2 ** (1 / measure.STEPS) * (1 + 1e-12)


def test_an_honest_value_that_is_faulted_and_an_error_that_never_is():
    assert measure._smallest(lambda error: True) == 0.0
    assert measure._smallest(lambda error: False) == NEVER


def found(limit: float, **other: float) -> DetectionLimit:
    limits = dict.fromkeys(JUDGES, NEVER) | {GATES: limit} | other
    return DetectionLimit("policy", "fp32", "fp32 logits", "gradients", "c", limits, {"grad_hidden": (1e-9, 6e-9)})


def test_ninety_nine_percent_of_one_case_and_of_a_run():
    own = [found(2.0**-k) for k in range(100)]
    values = table.limits(own, GATES)
    assert table.quantile(values, 0.99) == 2.0**-1
    assert table.quantile(values, 0.5) == 2.0**-50
    count = table.cases_of_a_run(own, 100)
    assert count == round(loss_family("policy").drawn["pr"] / 3)
    caught = sum(v <= table.by_a_run(own, 100) for v in values) / 100
    assert 1 - (1 - caught) ** count >= 0.99
    fewer = sum(v < table.by_a_run(own, 100) for v in values) / 100
    assert 1 - (1 - fewer) ** count < 0.99


def test_what_faults_honest_values_has_no_limit_but_an_alarm():
    own = [found(0.0), found(1e-3)]
    assert table.limits(own, GATES) == [1e-3]
    assert table.alarms(own, GATES) == 0.5
    text = table.markdown(own, 2)
    assert "| policy | gradients | fp32 | 2 | 0.001 |" in text
    assert "| 50 % · 0.002 · 100 % |" in table.tolerances([found(1e-3, **{measure.DEFAULTS: d}) for d in (0.0, 2e-3)])


def test_an_error_that_is_not_reached_says_how_many_cases_catch_one_percent():
    own = [found(1e-3), found(1e-3), found(NEVER)]
    assert "beyond 1 (67 % at 0.01)" in table.markdown(own, 3)


def test_the_pooled_slope_is_the_floor_where_slopes_are_alike():
    own = [found(1e-3)] * 40
    assert table.pooled(own, 40) == pytest.approx(2.0**-21 + 1e-9)
    assert table.pooled(own[:1], 40) == NEVER


def test_the_picture_is_a_picture():
    own = [found(2.0**-k, **{measure.LOOSE: 0.5}) for k in range(10)]
    drawn = xml.etree.ElementTree.fromstring(plot.svg(own, "fp32 logits"))
    assert drawn.tag.endswith("svg")
    curves = [e for e in drawn.iter() if e.tag.endswith("path") and e.get("stroke") == plot.STYLES[GATES][0]]
    assert len(curves) == 2  # one in the legend, one in the panel that has cases


CASE = {"B": 2, "T": 4, "V": 9, "H": 6, "peak": 1.0}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_one_case_is_measured_and_its_limits_mean_what_they_say(dtype):
    case = family("logprobs").case(3, dtype, CASE)
    oracle = oracle_of(case)
    by_target = {one.target: one for one in measure.measure("logprobs", dtype, "fp32 logits", oracle)}
    assert set(by_target) == {"log-probs", "gradients"}
    honest = measure.implementation("logprobs", "reordered")
    jury = measure.Jury(oracle, honest)
    values = measure._again(oracle, honest)
    limit = by_target["log-probs"].limits[GATES]
    below = limit / 2 ** (1 / measure.STEPS)
    assert jury.caught(measure._scaled(values, ("logps",), limit), ["logps"])
    assert not jury.caught(measure._scaled(values, ("logps",), below), ["logps"])
    assert limit < by_target["log-probs"].limits[measure.LOOSE]
    assert math.isfinite(by_target["gradients"].limits[GATES])


def test_the_gradient_of_a_float32_head_does_not_stand_for_a_narrow_one():
    case = family("logprobs").case(3, "bf16", CASE | {"head_dtype": "fp32"})
    found = measure.measure("logprobs", "bf16", "fp32 logits", oracle_of(case))
    assert [one.target for one in found] == ["log-probs"]


def test_a_policy_loss_is_edited_inside_where_its_log_probs_are_meant():
    case = family("policy").case(5, "fp32", CASE)
    oracle = oracle_of(case)
    plain, edited = (measure._again(oracle, measure.implementation("policy", "reordered", e)) for e in (0.0, 0.1))
    assert not math.isclose(float(plain["loss"]), float(edited["loss"]), rel_tol=1e-4)
    targets = [one.target for one in measure.measure("policy", "fp32", "fp32 logits", oracle)]
    assert targets == ["loss", "log-probs", "gradients"]


def test_drawn_cases_are_of_the_dtype_and_outside_autocast():
    cases = list(measure.drawn("logprobs", "fp32", 20, 0))
    assert len(cases) == 20
    assert {c.dtype for c in cases} == {"fp32"}
    assert all(c.settings.get("context") in (None, "checkpoint") for c in cases)
    assert cases[0].id == next(iter(measure.drawn("logprobs", "fp32", 1, 0))).id
