"""The night: proof of life, exit codes of its parts, the night after, going on with a killed one."""

import datetime
import itertools
import json
import os
import sys

import pytest
from click.testing import CliRunner
from msgspec.structs import replace

from cases.selftest.nightly.test_alarms import yesterday
from parity.cli.commands import main
from parity.cli.options import seconds as seconds_of
from parity.errors import UsageError
from parity.nightly import night, steps
from parity.results import memory
from parity.results.report.rows import read, rewrite
from parity.running import supervisor
from parity.running.plan import Options, ShardDone


@pytest.mark.parametrize("family", night.NAMES)
def test_a_planted_mistake_is_caught(family):
    assert night.proof(family, "cpu", 3)[0]


def test_a_mistake_that_is_not_caught_is_told(monkeypatch):
    monkeypatch.setattr(night, "run_case", lambda *_, **__: ())
    monkeypatch.setattr(night, "CASES", 2)
    line = "policy on cpu: planted gradients 1 % too large: NOT caught in 2 cases"
    assert night.proof("policy", "cpu", 3) == (False, line)


@pytest.mark.parametrize(
    "codes, expected", [((0, 0), 0), ((0, 1), 1), ((4, 1), 1), ((4, 0), 4), ((1, 3), 3), ((0, 70), 70), ((1, -9), -9)]
)
def test_the_gravest_part_decides(codes, expected):
    assert night.worst(codes) == expected


def test_times():
    assert [seconds_of(text) for text in ("6h", "90m", "1h30m", "45s")] == [21600, 5400, 5400, 45]
    for text in ("", "h", "6", "six hours", "-1h", "1h2h"):
        with pytest.raises(UsageError, match="cannot be read"):
            seconds_of(text)


def test_a_whole_short_night_and_the_next_one(tmp_path, warm_workers):
    words = ["nightly", "--profile", "quick", "--family", "logprobs", "--implementation", "fixes.selective_log_probs"]
    words += [word for name in ("history", "mutants", "unsloth", "upstream") for word in ("--skip", name)]
    words += ["--max-time", "4m", "--seed", "5", "--reports", str(tmp_path)]
    first = CliRunner().invoke(main, words)
    assert first.exit_code == 0, first.output
    assert json.loads((tmp_path / "night.json").read_text())["exit_code"] == 0
    assert (tmp_path / "index.html").exists() and "green" in (tmp_path / "issue.md").read_text()
    nights = ["notify", "--profile", "quick", "--reports", str(tmp_path)]
    assert "no run of profile nightly was ever kept here" in CliRunner().invoke(main, nights[:1] + nights[3:]).output
    told = CliRunner().invoke(main, [*nights, "--out", str(tmp_path / "text.md")])
    assert told.exit_code == 0 and told.output.startswith("parity: green")
    late = CliRunner().invoke(main, [*nights, "--stale", "0s"])
    assert late.exit_code == 3 and "no night" in late.output


def test_green_red_still_red_and_green_again(run, versions, tmp_path, monkeypatch):
    code, title, asked = run()
    assert (code, [words[0] for words in asked]) == (0, ["history", "upstream"]) and "green" in title
    assert (code, title) == (run()[0], run()[1]), "a night without a cause is as the one before"
    yesterday(tmp_path)
    monkeypatch.setenv("PLAYED_WRONG", "fused")
    versions["trl"] = "2.0"
    code, title, asked = run()
    assert code == 1 and title == "parity: 1 new finding in fused, since tonight"
    issue = (tmp_path / "issue.md").read_text()
    assert "trl 1.0 → 2.0" in issue and "`parity bisect trl --good 1.0 --bad 2.0 --case " in issue
    yesterday(tmp_path)
    code, title, asked = run()
    assert code == 1 and "since yesterday, " in title
    monkeypatch.setenv("PLAYED_WRONG", "plain")
    code, title, asked = run()
    assert (
        title == "parity: 1 new finding in plain, since tonight" and "Gone since" in (tmp_path / "issue.md").read_text()
    )
    monkeypatch.delenv("PLAYED_WRONG")
    assert run()[:2] == (0, title[: title.index(":")] + f": green ({datetime.datetime.now(datetime.UTC):%Y-%m-%d})")


def test_a_night_whose_time_was_over_can_be_green(run, tmp_path, monkeypatch):
    monkeypatch.setenv("PLAYED_SECONDS", "0.02")
    code, title, _ = run(max_time=3.0, profile="nightly")
    header, rows = read(tmp_path / "results.ndjson")
    assert rows and not header.end.complete, "it had time for all"
    assert code == 0 and title == f"parity: green ({datetime.datetime.now(datetime.UTC):%Y-%m-%d})"
    (kept,) = memory.runs(tmp_path / "history")
    assert kept.green and not kept.whole and any("the time was over: stopped after" in r for r in kept.reasons)
    assert "the time was over: stopped after" in (tmp_path / "issue.md").read_text()


def test_rows_of_a_shard_that_the_time_cut_short_outlast_a_kill(run, tmp_path, monkeypatch):
    """The long run is over when the night is killed: what it wrote stays, although its last shard did not come to its end."""
    whole, events, written = steps.run, supervisor.run, []

    def cut(*args):
        for shard, event in events(*args):
            done = shard.kind == "drawn" and isinstance(event, ShardDone)
            yield shard, replace(event, cases=event.cases - 1) if done else event

    def stops(*_):
        written.append(rows_of(tmp_path))
        raise MemoryError

    monkeypatch.setattr(supervisor, "run", cut)
    monkeypatch.setattr(steps, "run", stops)
    with pytest.raises(MemoryError):
        run()
    header, rows = read(tmp_path / "results.ndjson")
    assert {row.shard for row in rows if row.shard} - {part.name for part in header.parts}, "no shard was cut short"
    monkeypatch.setattr(steps, "run", whole)
    code, title, _ = run(resume=True)
    assert rows_of(tmp_path) == written[0] and code == 0 and "green" in title
    (kept,) = memory.runs(tmp_path / "history")
    assert kept.ended and sum("the time was over: stopped after" in r for r in kept.reasons) == 1


def test_a_night_that_was_killed_goes_on(run, tmp_path, monkeypatch):
    run(seed=7)
    expected = rows_of(tmp_path)
    whole, events = steps.run, supervisor.run

    def dies(*args):
        yield from itertools.islice(events(*args), 200)
        raise MemoryError

    def stops(name, *args):
        if name == "upstream":
            raise MemoryError
        os.utime(tmp_path / "night.json", (0, 0))
        return whole(name, *args)

    with pytest.raises(UsageError, match="that night has ended, with exit code 0: start a new one"):
        run(resume=True)

    def interrupted(*args):
        yield from itertools.islice(events(*args), 9)
        raise KeyboardInterrupt

    monkeypatch.setattr(supervisor, "run", interrupted)
    given = Options(profile="quick", families=("logprobs",), implementations=("fixes",), reports=tmp_path, seed=7)
    assert night.run(given, lambda line: None, lambda *_: None) == (130, None), "nothing more is done"
    header, rows = read(tmp_path / "results.ndjson")
    header.header.asked.confirm = False
    rewrite(tmp_path / "later.ndjson", header, rows)
    (tmp_path / "results.ndjson").rename(tmp_path / "of the night")
    (tmp_path / "later.ndjson").rename(tmp_path / "results.ndjson")
    with pytest.raises(UsageError, match="`parity run` has written it since: start a new night"):
        run(resume=True)
    (tmp_path / "of the night").rename(tmp_path / "results.ndjson")
    monkeypatch.setattr(supervisor, "run", dies)
    with pytest.raises(MemoryError):
        run(resume=True)
    monkeypatch.setattr(supervisor, "run", events)
    monkeypatch.setattr(steps, "run", stops)
    with pytest.raises(MemoryError):
        run(resume=True)
    assert rows_of(tmp_path) == expected, "the run has gone on and ended"
    assert (tmp_path / "night.json").stat().st_mtime, "its time since then counts as paused"
    monkeypatch.setattr(steps, "run", whole)
    monkeypatch.setattr(
        supervisor, "run", lambda plans, queue, *_: iter(()) if not queue.left else pytest.fail("again")
    )
    with pytest.raises(UsageError, match="its run had seed 7, not 8"):
        run(resume=True, seed=8)
    code, title, asked = run(resume=True)
    assert code == 0 and "green" in title and [words[0] for words in asked] == ["upstream"]
    assert rows_of(tmp_path) == expected and read(tmp_path / "results.ndjson")[0].header.seed == 7


def test_a_night_on_a_cluster_needs_ray(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match="--ray: Ray is not installed: pip install"):
        run(ray="auto")


def rows_of(reports):
    return sorted((r.case, r.implementation, r.quantity or "", r.verdict) for r in read(reports / "results.ndjson")[1])
