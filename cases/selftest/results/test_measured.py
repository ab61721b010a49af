"""Numbers for people."""

import math

import pytest

from cases.bench.measure import short
from parity.results.report import measured


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *(
            (0.0, "0"),
            (1.0, "1"),
            (0.5, "0.5"),
            (0.00541, "0.0054"),
            (219.6, "220"),
            (1849.0, "1,800"),
            (-0.25, "-0.25"),
        ),
        *((5.41e-6, "5.4e-6"), (1e-4, "1e-4"), (12345.0, "1.2e4"), (1.8337e36, "1.8e36"), (9.96e-4, "0.001")),
        *((math.inf, "∞"), (-math.inf, "-∞"), (math.nan, "NaN")),
    ],
)
def test_two_digits(value, text):
    assert short(value) == text


def test_a_share_is_rounded_to_neither_end():
    assert [measured.share(n, 10_000) for n in (0, 1, 1234, 9_999, 10_000)] == [
        *("0 %", "< 0.1 %", "12.3 %", "> 99.9 %", "100 %")
    ]
