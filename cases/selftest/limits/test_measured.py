"""The limits of detection are those that docs/sensitivity.md shows, to a factor of two."""

import dataclasses
from pathlib import Path

import pytest

from cases.selftest.limits.limits import DTYPES, LOGITS, drawn, groups, measure, quantile
from cases.selftest.oracles import oracle_of
from cases.selftest.slow import HOURS, number
from parity.registry import NAMES

PAGE = Path(__file__).parents[3] / "docs" / "sensitivity.md"


def shown():
    """(family, error, dtype, kind of logits) -> the ε that half of the cases catch, by the page."""
    rows = [line.strip("| ").split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    for family, target, dtype, half, _ in (row for row in rows if len(row) == 5 and row[0] in NAMES):
        name = dtype.split(",")[0]
        yield (family, target, name, list(LOGITS)[dtype != name]), float(half)


@pytest.mark.slow
@pytest.mark.timeout(HOURS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_the_limits_are_those_of_the_page(name, dtype, device, record_property):
    count, found = number("CASES", 120), []
    for case in drawn(name, dtype, count, number("SEED", 0)):
        oracle = oracle_of(case, device)
        for kind in list(LOGITS)[: 1 if dtype == "fp32" else None]:
            found += measure(name, dtype, kind, oracle)
    record_property("limits", [[count, *dataclasses.astuple(one)] for one in found])
    expected = {key: half for key, half in shown() if key[0] == name and key[2] == dtype}
    halves = {key: quantile([one.limit for one in group], 0.5) for key, group in groups(found).items()}
    assert {key: halves[key] for key, half in expected.items() if halves[key] > 2 * half} == {}
