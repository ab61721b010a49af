"""Truncated sequences: the cut by hand, the released trainers, and a cut that is another than the config's."""

import pytest

from cases.selftest.trainers.asked import disagreeing, verdicts
from parity.trainers.checks import variations as truncation
from parity.trainers.rig.stored_window import Window


def test_the_cut_by_hand():
    window = [(list(range(12)), 3), ([1, 2, 3], 1)]
    assert truncation.cut(window, "keep_start") == [(list(range(10)), 3), ([1, 2, 3], 1)]
    assert truncation.cut(window, "keep_end") == [(list(range(2, 12)), 1), ([1, 2, 3], 1)]


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("mode", ["keep_start", "keep_end"])
def test_some_of_the_window_is_cut_and_all_of_it_can_be_scored(mode, side):
    whole = Window.of("dpo-trainer")
    window, cut = (w.pair()[side] for w in (whole, truncation.Cut("dpo-trainer", whole.rows, mode=mode)))
    assert 0 < sum(a != b for a, b in zip(window, cut, strict=True)) < len(window)
    assert all(0 < start < len(tokens) for tokens, start in cut)


def test_a_cut_at_the_other_end_is_seen(monkeypatch):
    cut = truncation.cut
    monkeypatch.setattr(truncation, "cut", lambda window, mode: cut(window, "keep_end"))
    assert disagreeing(verdicts("dpo-trainer", "truncation")) == {"sequences", "loss", "gradient"}
