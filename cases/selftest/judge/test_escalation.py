"""A disagreement counts when no larger number of replicas mends it."""

import math

import pytest

from parity.judge.escalation import (
    CERTAIN,
    CONFIRMATION,
    FEW,
    LARGE,
    LAST_WORD,
    REPLICAS,
    TWICE,
    escalate,
    if_near,
    ladder,
)
from parity.judge.gates import Judgement


def ladder_of(headrooms, **fields):
    """A judge whose headroom falls with the number of replicas, and the counts that it was asked for."""
    asked = []

    def judge_with(count):
        asked.append(count)
        return {"x": Judgement({"norm": headrooms[count]}, **fields)}

    return judge_with, asked


def settle(judge_with, counts=(REPLICAS, CONFIRMATION), certain=math.inf):
    return escalate(lambda count, finer, names: judge_with(count), counts, certain=certain)


@pytest.mark.parametrize(
    ("headrooms", "expected"),
    [
        ({0: 0.9}, [0]),
        ({0: 1.1, 4: 0.5}, [0, 4]),
        ({0: math.inf, 4: 0.6, 12: 0.9}, [0, 4, 12]),
        ({0: 99.0, 4: 60.0, 12: 50.0, 60: 1.2, 480: 0.8}, [0, 4, 12, 60, 480]),
    ],
    ids=["by its own precision", "few replicas by half", "more where few are unsure", "many mend it"],
)
def test_what_agrees_is_judged_with_no_more_replicas(headrooms, expected):
    judge_with, asked = ladder_of(headrooms)
    assert settle(judge_with, (0, FEW, 12, 60, 480), CERTAIN)["x"].agrees and asked == expected


def test_what_was_accepted_is_not_judged_again():
    asked = []

    def judge_with(count, finer, names):
        asked.append(names)
        given = {"a": 0.9, "b": 2.0} if count == 0 else {"b": 0.7}
        return {name: Judgement({"norm": h}) for name, h in given.items()}

    found = escalate(judge_with, (0, 12, 60))
    assert asked == [None, ["b"]] and {n: j.headroom for n, j in found.items()} == {"a": 0.9, "b": 0.7}


@pytest.mark.parametrize(("last", "asks"), [(1.02, True), (4.0, False), (0.9, False)])
def test_what_nearly_agrees_is_asked_of_more(last, asks):
    judge_with, asked = ladder_of({12: 50.0, 60: last, 480: 0.4})
    judged = escalate(lambda count, finer, names: judge_with(count), (12, 60), near=lambda names: 480 * len(names))
    assert judged["x"].agrees == (last < 3.0) and asked == [12, 60] + [480] * asks
    asked.clear()
    escalate(lambda count, finer, names: judge_with(count), (12, 60), near=lambda names: 60)
    assert asked == [12, 60]


@pytest.mark.parametrize("headroom", [math.inf, CERTAIN, math.nan])
def test_what_is_certain_is_not_judged_again(headroom):
    judge_with, asked = ladder_of({12: headroom})
    assert not settle(judge_with, certain=CERTAIN)["x"].agrees and asked == [12]


def test_an_infinity_where_replicas_overflow_is_open():
    judge_with, asked = ladder_of({12: math.inf, 60: 0.5}, overflows=True)
    assert settle(judge_with)["x"].agrees and asked == [12, 60]


def test_one_certain_disagreement_settles_what_is_one_result():
    asked = []

    def judge_with(count):
        asked.append(count)
        return {"a": Judgement({"norm": math.inf}), "b": Judgement({"norm": 2.0})}

    settle(judge_with, certain=CERTAIN)
    assert asked == [REPLICAS]
    settle(judge_with)
    assert asked == [REPLICAS, REPLICAS, CONFIRMATION]


def test_the_last_count_follows_the_size_of_a_replica():
    assert ladder(LARGE - 1) == (0, REPLICAS, TWICE, CONFIRMATION, LAST_WORD)
    assert ladder(1 << 16) == (0, FEW, REPLICAS, TWICE, CONFIRMATION, 128)
    assert ladder(1 << 30) == (0, FEW, REPLICAS, TWICE, CONFIRMATION, CONFIRMATION)
    assert (if_near(1), if_near(1 << 21), if_near(1 << 30)) == (LAST_WORD, 128, CONFIRMATION)
    assert if_near(1, 1 << 19) == 128
