"""The search of the first red night after a version moved."""

import pytest
from msgspec.structs import replace

from cases.selftest.nightly.nights import yesterday
from parity.nightly import night, steps
from parity.results import memory, trend


def test_a_search_that_was_cut_is_begun_again_and_one_back_in_time_asks_the_other_question(
    played, tmp_path, monkeypatch
):
    run, versions = played
    assert run()[0] == 0
    yesterday(tmp_path)
    monkeypatch.setenv("PLAYED_WRONG", "fused")
    versions["trl"] = "0.9"
    asked, ends = [], [None, 3, 3]

    def step(name, words, log, limit, module):
        asked.append(words)
        return steps.CommandOutcome(name, "", ends.pop(0) if words[0] == "bisect" else 0, 1.0, "")

    monkeypatch.setattr(steps, "run", step)
    assert run()[0] == 1
    assert asked[0][:9] == ["bisect", "trl", "--good", "1.0", "--bad", "0.9", "--find", "fixed", "--case"]
    for why in ("it had no time last night", "it had no environment last night", ""):
        yesterday(tmp_path)
        asked.clear()
        run()
        assert (asked[0][:2] == ["bisect", "trl"]) is bool(why), why


def test_after_a_version_moved_the_long_run_leaves_time_for_a_search(played, tmp_path, monkeypatch):
    """A night without other commands gave it all, and its search ended before it began."""
    run, versions = played
    given, execute = [], night.running.execute
    monkeypatch.setattr(night.running, "execute", lambda o, *more: given.append(o.max_time) or execute(o, *more))
    run(others=(), max_time=1000.0)
    run(others=(), max_time=1000.0)
    versions["trl"] = "2.0"
    run(others=(), max_time=1000.0)
    assert given[0] > 900 and given[1] > 900 and 500 < given[2] <= 750


def test_a_search_is_for_a_librarys_finding_before_a_users_own(played, tmp_path):
    run, versions = played
    run()
    (green,) = memory.runs(tmp_path / "history")
    seen = [
        memory.Seen(name, name, "logprobs", "disagree", None, "", [], None, 1, None, "", "parity replay x.json")
        for name in ("kernel.py:loss", "trl.loss", "kernel.py:other")
    ]
    for found, name in ((seen, "trl.loss"), (seen[:1], "kernel.py:loss")):
        red = replace(green, id="red", exit_code=1, findings=found, versions=versions | {"trl": "2.0"})
        (words,) = night.bisects(trend.change(red, [green]), tmp_path)
        assert words[words.index("--implementation") + 1] == name


@pytest.mark.parametrize("verdict, more", [("crashed", ["--failure", "crashed"]), ("disagree", [])])
def test_a_search_asks_for_what_the_finding_is(played, tmp_path, verdict, more):
    run, versions = played
    run()
    (green,) = memory.runs(tmp_path / "history")
    seen = memory.Seen("k", "fused", "logprobs", verdict, None, "", [], None, 1, None, "", "parity replay x.json")
    red = replace(green, id="red", exit_code=1, findings=[seen], versions=versions | {"trl": "2.0"})
    (words,) = night.bisects(trend.change(red, [green]), tmp_path)
    assert words[6:-6] == more and words[-6:-4] == ["--case", "x.json"]
