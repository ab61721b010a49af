"""The search, on every small input: it is right by enumeration, not by example."""

import collections
import itertools
import math

import pytest

from parity.versions.bisect import Measurement, bisect, find_change


def scripted(verdicts, headrooms=None, again=None):
    """A measure over indices; `again` overrides what a repeated measurement says: {(index, repeat): verdict}."""
    levels, asked = headrooms or [None] * len(verdicts), collections.Counter()

    def measure(index, left):
        asked[index] += 1
        return Measurement((again or {}).get((index, asked[index] - 1), verdicts[index]), levels[index])

    return measure


@pytest.mark.parametrize("count", [*range(2, 40), 45, 105])
def test_one_change_is_found_in_a_logarithm_of_steps(count):
    for change in range(1, count):
        lefts = []

        def ask(index, left, change=change, lefts=lefts):
            lefts.append(left)
            return index >= change

        assert find_change(count, ask) == (change - 1, change)
        assert len(lefts) <= math.ceil(math.log2(count - 1))
        still = range(len(lefts) - 1, -1, -1)
        assert all(real <= said <= real + 1 for said, real in zip(lefts, still, strict=True)), f"steps left: {lefts}"


def test_a_block_that_cannot_be_judged_is_jumped_over():
    asked = []

    def ask(index, left):
        asked.append(index)
        return None if 15 <= index <= 30 else index >= 40

    assert find_change(45, ask) == (39, 40)
    assert len(asked) <= 9, asked


@pytest.mark.parametrize("find", ["broken", "fixed"])
@pytest.mark.parametrize("count", range(2, 6))
def test_every_sheet_of_verdicts(count, find):
    good, bad = ("agree", "disagree") if find == "broken" else ("disagree", "agree")
    for verdicts in itertools.product(("agree", "disagree", "crashed"), repeat=count):
        found = bisect(range(count), scripted(verdicts), find=find)
        first, last = verdicts[0], verdicts[-1]
        if "crashed" in (first, last):
            expected = "unjudged"
        elif (first, last) == (good, bad):
            expected = "found"
        elif first == last:
            expected = "alike"
        else:
            expected = "swapped"
        assert found.outcome == expected, verdicts
        if expected == "found":
            assert (verdicts[found.low], verdicts[found.high], found.by) == (good, bad, "verdict")
            assert list(found.between) == list(range(found.low + 1, found.high))
            assert {verdicts[index] for index in found.between} <= {"crashed"}
            seen = [index for index, _ in found.measured]
            assert seen[:2] == [0, count - 1], "both ends first"
            assert seen[-4:] == [found.low, found.high] * 2, "the pair is confirmed twice"
            assert seen.count(found.low) == seen.count(found.high) == 3
        else:
            assert len(found.measured) == 2, "no search without ends"


def test_refusing_is_an_answer_of_its_own():
    assert bisect(range(3), scripted(["refused", "refused", "agree"]), find="fixed").low == 1
    assert bisect(range(3), scripted(["agree", "refused", "disagree"])).between == (1,), "like neither end"
    assert bisect(range(2), scripted(["refused", "disagree"])).outcome == "found", "refused is better than wrong"
    assert bisect(range(2), scripted(["refused", "refused"])).outcome == "alike"


@pytest.mark.parametrize("verdict", ["agree", "disagree"])
def test_equal_verdicts_are_searched_by_headroom(verdict):
    for change in range(1, 8):
        for low, high in ((2.0, 300.0), (300.0, 2.0), (0.0, 0.9)):
            levels = [low * 1.1] * change + [high * 0.9] * (8 - change)
            found = bisect(range(8), scripted([verdict] * 8, levels))
            assert (found.outcome, found.by, found.low, found.high) == ("found", "headroom", change - 1, change)


def test_headroom_that_is_not_finite_is_a_level_of_its_own():
    for change in range(1, 6):
        levels = [3.0] * change + [None] * (6 - change)
        assert bisect(range(6), scripted(["disagree"] * 6, levels)).high == change
        assert bisect(range(6), scripted(["disagree"] * 6, levels[::-1])).high == 6 - change
    levels = [2.0, 2.0, None, 90.0]
    assert bisect(range(4), scripted(["disagree"] * 4, levels)).high == 2, "infinite goes with the greater end"


def test_headroom_within_a_factor_of_two_or_below_the_noise_is_alike():
    for pair in ((2.0, 3.9), (1e-9, 1e-4), (0.0, 0.0), (None, None)):
        assert bisect(range(2), scripted(["disagree"] * 2, pair)).outcome == "alike", pair
    assert bisect(range(2), scripted(["agree"] * 2, (None, 0.5))).outcome == "alike", "nothing to compare"


@pytest.mark.parametrize("index, repeat", [(1, 1), (1, 2), (2, 1), (2, 2)])
@pytest.mark.parametrize("other", ["crashed", "opposite"])
def test_a_pair_that_does_not_answer_alike_again_is_unstable(index, repeat, other):
    verdicts = ["agree", "agree", "disagree", "disagree"]
    changed = "crashed" if other == "crashed" else verdicts[3 - index]
    found = bisect(range(4), scripted(verdicts, again={(index, repeat): changed}))
    assert (found.outcome, found.low, found.high) == ("unstable", 1, 2)


@pytest.mark.parametrize("count", [0, 1])
def test_a_search_needs_two_ends(count):
    with pytest.raises(ValueError, match=f"over {count} releases"):
        bisect(range(count), scripted([]))
