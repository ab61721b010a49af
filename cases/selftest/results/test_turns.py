"""Whose turn it is: new units first, then wrong ones and old ones by turns; what is stopped loses nothing that was known."""

import concurrent.futures
import datetime

import pytest

from parity.errors import UsageError
from parity.results.turns import RIGHT, TRIES, WRONG, Turns, in_turn, set_aside


def some(turns, units, outcome=RIGHT):
    for unit in units:
        turns.begin(unit)
        turns.end(unit, outcome)


def test_what_is_new_comes_first_then_what_was_longest_ago(tmp_path):
    path = tmp_path / "deep" / "turns.json"
    turns = Turns.read(path)
    assert turns.order("abcd") == list("abcd")
    some(turns, "ab")
    again = Turns.read(path)
    assert again.order("abcde") == list("cdeab")
    some(again, "ca")
    assert Turns.read(path).order("abc") == list("bca")


def test_over_some_nights_each_is_looked_at_although_some_stay_wrong(tmp_path):
    units, path = [f"u{n}" for n in range(12)], tmp_path / "turns.json"
    for night in range(6):
        turns = Turns.read(path)
        for unit in turns.order(units)[:4]:
            some(turns, [unit], WRONG if unit in units[:4] else RIGHT)
        if night == 2:
            assert not [u for u in units if not turns.known.get(u)], "three nights of four are enough for twelve"
    assert len({turns.known[u].ended for u in units}) == 12 and min(turns.known[u].begun for u in units[4:]) > ""
    assert turns.having(WRONG) == units[:4]


def test_what_was_begun_and_stopped_is_named_when_that_was_so_every_time_and_goes_behind_then(tmp_path):
    path = tmp_path / "turns.json"
    for expected in ("xy", "xy", "xy"):
        turns = Turns.read(path)
        assert turns.order("xy") == list(expected) and not turns.starved()
        some(turns, "y")
        turns.begin("x")  # and the process is killed
    assert Turns.read(path).starved() == ["x"] and Turns.read(path).oldest() == ""
    assert Turns.read(path).order("xy") == list("yx"), "the others do not wait for it"
    some(turns, "x")
    assert not Turns.read(path).starved() and Turns.read(path).oldest()


def test_what_was_cut_at_the_end_of_a_night_is_not_cut_at_the_end_of_each(tmp_path):
    path = tmp_path / "turns.json"
    for _ in range(TRIES + 2):  # always time for four of five, and for the beginning of one more
        turns = Turns.read(path)
        order = turns.order("abcde")
        some(turns, order[:4])
        turns.begin(order[4])
        assert not turns.starved()
    assert all(turn.ended for turn in turns.known.values())


def test_what_was_reached_since(tmp_path):
    turns = Turns()
    turns.order("ab")
    some(turns, "a")
    since = datetime.datetime.now(datetime.UTC)
    some(turns, "b", WRONG)
    turns.begin("a")
    assert turns.reached(since) == ["b"] and turns.having(WRONG) == ["b"]


def test_a_file_of_something_else_is_one_line(tmp_path):
    path = tmp_path / "turns.json"
    path.write_text('{"units": 3}')
    with pytest.raises(UsageError, match=r"turns\.json"):
        Turns.read(path)


@pytest.mark.parametrize("content", ["", "{", '{"units": 3}'])
def test_a_file_that_cannot_be_read_is_set_aside_and_named(tmp_path, content):
    path = tmp_path / "turns.json"
    some(Turns.read(path), "ab")
    assert set_aside(path) == "" and Turns.read(path).known, "a good one stays"
    path.write_text(content)
    told = set_aside(path)
    assert "turns.json" in told and "set aside as turns.json.unreadable" in told
    assert not Turns.read(path).known and (tmp_path / "turns.json.unreadable").read_text() == content


@pytest.mark.parametrize("workers", [0, 2])
def test_units_begin_when_a_worker_is_free(tmp_path, workers):
    turns, jobs = Turns.read(tmp_path / "turns.json"), {u: (u,) for u in "abcdef"}
    pool = concurrent.futures.ThreadPoolExecutor(workers) if workers else None
    found = in_turn(turns, jobs, str.upper, lambda r: WRONG if r == "C" else RIGHT, pool, workers or 1)
    first = next(found)
    assert sum(bool(t.begun) for t in turns.known.values()) <= max(workers, 1), first
    assert sorted([first, *found]) == list("ABCDEF") and turns.having(WRONG) == ["c"]
    assert Turns.read(turns.path).order("abcdef")[0] == "c", "wrong ones come early"
