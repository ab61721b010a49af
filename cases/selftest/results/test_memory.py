"""Runs are kept and compared: new, still there, gone, missing; the issue says so."""

import datetime
import json

import pytest
from msgspec.structs import replace

from cases.selftest.results.runs import BAD, GOOD, START, about, changed, keep, night, row
from parity.results import memory, notify, trend
from parity.results.report.summary import summarise
from parity.results.row import About, End, Header


def test_a_run_is_read_as_it_was_kept(tmp_path):
    rows = [*GOOD, row(implementation="trl.g", headroom=0.9, dtype="bf16")]
    kept = night(tmp_path, 0, rows, versions={"trl": "1.15.0"})
    assert (kept.id, kept.profile, kept.exit_code, kept.ended, kept.green) == ("run0", "nightly", 0, True, True)
    assert kept.started == START and kept.versions == {"trl": "1.15.0"}
    assert kept.compared == {("lib.loss", "policy", "cpu"): 10, ("trl.g", "policy", "cpu"): 1}
    assert [r.id for r in memory.runs(tmp_path)] == ["run0"] and not kept.findings


@pytest.mark.parametrize("damage", ["", "no run" * 100, {"schema": 99}, {"counts": 3}])
def test_a_foreign_file_is_one_line(tmp_path, damage):
    night(tmp_path, 0, GOOD)
    (path,) = tmp_path.iterdir()
    path.write_text(damage if isinstance(damage, str) else json.dumps(json.loads(path.read_text()) | damage))
    good, told = night(tmp_path, 1, GOOD), list[str]()
    assert [run.id for run in memory.runs(tmp_path, told.append)] == [good.id]
    assert len(told) == 1 and path.name in told[0] and "\n" not in told[0]


def test_what_is_gone_counts_only_if_it_was_looked_at(tmp_path):
    night(tmp_path, 0, [*GOOD, *BAD], 1)
    looked = trend.change(night(tmp_path, 1, GOOD), memory.runs(tmp_path)[:1])
    assert len(looked.fixed) == 1
    blind = trend.change(night(tmp_path, 2, [row(implementation="trl.g")]), memory.runs(tmp_path)[:1])
    assert not blind.fixed


def test_what_is_told_once_is_kept_for_each_path_of_a_trainer(tmp_path):
    """Else one that fails in more cases in another night would be new, and one of the nights before gone."""
    where = {"family": "dpo-trainer", "verdict": "disagree", "case": "dpo-trainer-1"}
    kept = night(tmp_path, 0, [row(implementation=f"dpo-trainer.{path}", **where) for path in ("fixed", "released")], 1)
    assert [f.implementation for f in kept.findings] == ["dpo-trainer.released", "dpo-trainer.fixed"]


def test_the_same_finding_on_another_case_is_the_same(tmp_path):
    one = night(tmp_path, 0, [row(headroom=40.0, verdict="disagree", case="policy-7")], 1)
    two = night(tmp_path, 1, [row(headroom=9.0, verdict="disagree", case="policy-8")], 1)
    assert one.findings[0].key == two.findings[0].key
    other = night(tmp_path, 2, [row(headroom=9.0, verdict="disagree", quantity="grad_hidden")], 1)
    assert other.findings[0].key != one.findings[0].key


def test_comparisons_that_a_new_crash_explains_are_not_missing(tmp_path):
    for day in range(3):
        night(tmp_path, day, GOOD)
    crash = row(verdict="crashed", quantity=None)
    for known in (None, "entry"):
        found = trend.change(night(tmp_path, 3, [replace(crash, known=known)], 1), memory.runs(tmp_path)[:3])
        assert bool(found.missing) is (known is not None)


def compared(number, cases, implementation="lib.loss", whole=True, **others):
    """A kept run with so many comparisons of an implementation, and of others."""
    counts = [(i, "policy", "cpu", n) for i, n in ({implementation: cases} | others).items()]
    at = START + datetime.timedelta(days=number)
    return memory.Run(id=f"run{number}", started=at, profile="nightly", device="cpu", counts=counts, whole=whole)


def named(tonight, *nights, **others):
    """Whether the last of some nights is said to have compared too little."""
    past = [compared(day, n) for day, n in enumerate(nights)]
    return bool(trend.change(compared(len(past), tonight, **others), past).missing)


@pytest.mark.parametrize(
    "cases, nights, missing",
    [
        (673, (1000,) * 7, True),
        (674, (1000,) * 7, False),
        (35, (52, 44, 41), False),  # a night that was seen
        (8, (52, 44, 41), True),
        (1, (25,) * 7, False),  # by chance
        (0, (10,) * 3, True),
        (0, (1,), True),  # the last green night compared it
    ],
)
def test_fewer_comparisons_than_usual_are_named_where_chance_does_not_explain_them(cases, nights, missing):
    assert named(cases, *nights) is missing


def test_what_was_never_compared_on_a_green_night_may_be_0_by_chance():
    for count, missing in ((25, False), (30, True)):
        past = [replace(compared(day, count), exit_code=1) for day in range(3)]
        assert bool(trend.change(compared(3, 0), past).missing) is missing


def counted(tmp_path, day, seen, asked, planned=900):
    """A night whose time was over after `asked` cases, of which an implementation took `seen`."""
    rows = [row(implementation="trl.g", case=f"policy-{n}") for n in range(asked)]
    end = End(cases=asked, of=planned, complete=asked == planned, exit_code=0)
    header = about(day)
    header.end = end
    return keep(summarise(header, [*rows, *(row(case=f"policy-{n}") for n in range(seen))]), 0, tmp_path)


@pytest.mark.parametrize(
    "seen, asked, missing",
    [(100, 100, False), (40, 50, False), (51, 100, False), (20, 100, True), (0, 60, True), (0, 0, True)],
)
def test_of_nights_whose_time_was_over_the_share_of_the_cases_counts(tmp_path, seen, asked, missing):
    for day in range(3):
        counted(tmp_path, day, 200, 200 + day, planned=900 if day else 200)
    last = counted(tmp_path, 3, seen, asked)
    assert last.green and not last.whole
    assert bool(trend.change(last, memory.runs(tmp_path)[:3]).missing) is missing


def test_what_is_seldom_compared_may_be_0_in_a_night_whose_time_was_over(tmp_path):
    past = [counted(tmp_path, day, 2, 200, planned=200) for day in range(3)]
    assert past[-1].green and not trend.change(counted(tmp_path, 3, 0, 60), past).missing


def test_a_run_that_was_stopped_is_not_green(tmp_path):
    stopped = counted(tmp_path, 0, 3, 3)
    assert stopped.ended
    header = Header(run="x", header=About(), end=End(cases=3, of=9, complete=False, exit_code=143))
    assert not memory.of(summarise(header, GOOD), 0).ended


def test_runs_of_another_profile_or_device_do_not_count(tmp_path):
    night(tmp_path, 0, GOOD, profile="quick")
    night(tmp_path, 1, GOOD, device="cuda")
    assert trend.change(night(tmp_path, 2, BAD, 1), memory.runs(tmp_path)[:2]).before is None


def test_versions_that_moved_since_the_last_green_run(tmp_path):
    night(tmp_path, 0, GOOD, versions={"trl": "1.15.0", "torch": "2.13.0"})
    night(tmp_path, 1, BAD, 1, versions={"trl": "1.15.1", "torch": "2.13.0"})
    last = night(tmp_path, 2, BAD, 1, versions={"trl": "1.16.0", "torch": "2.13.0"})
    change = trend.change(last, memory.runs(tmp_path)[:2])
    assert change.moved == {"trl": ("1.15.0", "1.16.0")} and change.green.id == "run0"
    assert "trl 1.15.0 → 1.16.0" in notify.body(change)


def test_the_title_says_who_and_since_when(tmp_path):
    green = trend.change(night(tmp_path, 0, GOOD), [])
    assert notify.title(green) == "parity: green (2026-11-01)"
    red = trend.change(night(tmp_path, 1, [*GOOD, *BAD], 1), memory.runs(tmp_path)[:1])
    assert notify.title(red) == "parity: 1 new finding in lib.loss, since tonight"
    for day, said in ((1.5, "01:17 today"), (2, "yesterday, 2026-11-02"), (4, "2026-11-02, 3 days")):
        again = trend.change(night(tmp_path, day, [*GOOD, *BAD], 1), memory.runs(tmp_path)[:2])
        assert notify.title(again) == f"parity: 1 new finding in lib.loss, since {said}"
    more = [*GOOD, *BAD, row(implementation="trl.g", headroom=9.0, verdict="disagree")]
    worse = trend.change(night(tmp_path, 2, more, 1), memory.runs(tmp_path)[:2])
    title = "parity: 2 new findings in lib.loss and 1 more, since yesterday, 2026-11-02, 1 of them since tonight"
    assert notify.title(worse) == title
    blind = trend.change(night(tmp_path, 2, GOOD, 3), memory.runs(tmp_path)[:1])
    assert notify.title(blind) == "parity: red (2026-11-03): nothing, or not enough, was compared"


def test_a_night_that_did_not_come_is_red(tmp_path):
    day = datetime.timedelta(hours=36)
    assert trend.stale([], day, START) == "no such run was ever kept here"
    past = [night(tmp_path, 0, GOOD)]
    assert not trend.stale(past, day, START + datetime.timedelta(hours=35))
    assert "37 h ago" in trend.stale(past, day, START + datetime.timedelta(hours=37))


@pytest.mark.parametrize(
    "versions, fields, said",
    [
        ({"trl": "2.0"}, {}, "parity bisect trl --good 1.16.0 --bad 2.0 --case policy-1 --implementation lib.loss"),
        ({"trl": "0.9"}, {}, "--bad 0.9 --find fixed --case policy-1"),
        ({"trl": "2.0"}, {"verdict": "crashed", "quantity": None}, "--bad 2.0 --failure crashed --case"),
        ({"trl": "2.0", "liger-kernel": "1"}, {}, "parity bisect trl"),
        ({"trl": "1.16.0"}, {}, ""),
    ],
)
def test_the_command_that_finds_the_release(tmp_path, versions, fields, said):
    night(tmp_path, 0, GOOD)
    users = [row(implementation="my.py:f", headroom=99.0, verdict="disagree")]
    bad = [row(**{"headroom": 40.0, "verdict": "disagree"} | fields)]
    red = night(tmp_path, 1, [*GOOD, *users, *bad], 1, versions)
    change = trend.change(red, memory.runs(tmp_path))
    assert said in change.search and bool(said) == bool(change.search)
    assert (said in notify.body(change)) and "my.py" not in change.search


def test_of_two_that_moved_the_library_of_the_finding_is_searched(tmp_path):
    night(tmp_path, 0, GOOD, versions={"trl": "1", "liger-kernel": "1"})
    bad = changed(BAD, implementation="liger.f")
    red = night(tmp_path, 1, [*GOOD, *bad], 1, {"trl": "2", "liger-kernel": "2"})
    assert trend.change(red, memory.runs(tmp_path)).search.startswith("parity bisect liger-kernel --good 1 --bad 2")
