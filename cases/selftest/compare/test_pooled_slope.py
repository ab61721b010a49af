"""The pooled slope: a scale error that no case shows by itself."""

from __future__ import annotations

import random

import pytest

from cases.selftest.results.runs import row
from parity.compare.pooled_slope import POOL_FLOOR, POOL_MINIMUM, mean_slope, pooled


def rows(scale: float, count: int = 100, dtype: str = "fp32", noise: float = 1e-4, loud: int = 5, device="cpu"):
    """Agreeing rows with slopes of `scale` plus noise within their unit; a few of them are nothing but noise."""
    rng = random.Random(3)
    for k in range(count):
        unit = 1e3 if k < loud else noise
        slope = scale + rng.gauss(0, unit)
        gates = {"slope": abs(slope) / (6 * unit)}
        yield row(f"c{k}", "grad_weight", family="logprobs", dtype=dtype, device=device, slope=slope, gates=gates)


def test_a_scale_below_the_unit_of_every_case_is_seen_and_honest_noise_agrees():
    """2e-4 beside a unit of 1e-4 a case, whose gates allow 6e-4; five cases in which rounding is a thousand times the value."""
    (right,), (wrong,) = pooled(list(rows(0.0))), pooled(list(rows(2e-4)))
    assert (right.verdict, right.quantity) == ("agree", "pooled slope: grad_weight")
    assert (wrong.verdict, wrong.cls) == ("disagree", "precision")
    assert wrong.slope == pytest.approx(2e-4, rel=0.3)


@pytest.mark.parametrize(
    ("floors", "device", "verdict"), [(0.5, "cpu", "agree"), (3, "cpu", "disagree"), (3, "cuda", "disagree")]
)
def test_a_bias_below_the_floor_is_rounding(floors, device, verdict):
    (row,) = pooled(list(rows(floors * POOL_FLOOR["bf16"], dtype="bf16", noise=1e-6, device=device)))
    assert row.verdict == verdict


def test_too_few_cases_are_not_pooled():
    assert pooled(list(rows(1.0, count=POOL_MINIMUM - 1, loud=0))) == []


def test_units_that_are_too_small_do_not_shrink_the_error():
    """Where slopes scatter by more than their units say, the scatter itself is the error."""
    rng = random.Random(5)
    slopes = [(rng.gauss(0, 1.0), 6e-3) for _ in range(400)]
    mean, error = mean_slope(slopes, 2.0**-20)
    assert error == pytest.approx(1 / 20, rel=0.2)
    assert abs(mean) < 4 * error
