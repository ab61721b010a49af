"""The night: proof of life, exit codes of its parts, what it holds the next night to, and its steps."""

import contextlib
import dataclasses
import datetime
import itertools
import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from parity.cli import show
from parity.cli.commands import main
from parity.cli.nightly import duration
from parity.errors import UsageError
from parity.nightly import night, proof, steps
from parity.process import Terminated
from parity.results import memory, notify, trend
from parity.results.header import About, Header
from parity.results.report.rows import read
from parity.results.row import Row
from parity.running import findings, provenance, supervisor

PLAYED = Path(supervisor.__file__).parents[2] / "fixtures" / "played_worker.py"


def test_a_planted_mistake_is_caught_in_every_family():
    found = proof.proof("cpu", 3)
    assert [p.family for p in found] == list(proof.FAMILIES)
    assert all(p.holds for p in found), [str(p) for p in found]


def test_a_judge_that_sees_nothing_ends_the_night(tmp_path, monkeypatch):
    blind = proof.Proof("policy", "cpu", "kl-sign", caught=False, cases=120, innocent=True)
    monkeypatch.setattr(night, "proof", lambda device, seed: [blind])
    monkeypatch.setattr(night.running, "execute", lambda *_: pytest.fail("the run began all the same"))
    told = []
    code, change = night.run(night.Night(reports=tmp_path), told.append, None)
    assert (code, change) == (3, None) and any("NOT caught" in line for line in told)
    assert json.loads((tmp_path / "night.json").read_text())["exit_code"] == 3


@pytest.mark.parametrize(
    "codes, expected", [((0, 0), 0), ((0, 1), 1), ((4, 1), 1), ((4, 0), 4), ((1, 3), 3), ((0, 70), 70), ((1, -9), -9)]
)
def test_the_gravest_part_decides(codes, expected):
    assert night.worst(codes) == expected


@pytest.mark.parametrize("text, seconds", [("6h", 21600), ("90m", 5400), ("1h30m", 5400), ("45s", 45)])
def test_times(text, seconds):
    assert duration(text).total_seconds() == seconds


@pytest.mark.parametrize("text", ["", "h", "6", "six hours", "-1h", "1h2h"])
def test_a_time_that_cannot_be_read(text):
    with pytest.raises(UsageError, match="cannot be read"):
        duration(text)


def test_a_step_ends_with_its_time(tmp_path, monkeypatch):
    monkeypatch.setattr(
        steps, "COMMAND", (sys.executable, "-c", "import sys, time; print('here', flush=True); time.sleep(60)")
    )
    begun = time.monotonic()
    step = steps.run("slow", ["x"], tmp_path / "slow.log", 2.0)
    assert step.exit_code is None and step.tail == "here" and time.monotonic() - begun < 40


def test_a_step_shows_the_whole_report_of_a_search(tmp_path, monkeypatch):
    program = "for n in range(30): print('measuring', n)\nprint('became right in trl 1.14.0')\nfor n in range(17): print('r', n)"
    monkeypatch.setattr(steps, "COMMAND", (sys.executable, "-c", program))
    assert "became right in trl 1.14.0" in steps.run("bisect trl", ["x"], tmp_path / "log", 60.0).tail


def test_a_command_that_is_asked_to_end_takes_its_child_with_it(tmp_path, monkeypatch):
    program = "import os, time; print(os.getpid(), flush=True); time.sleep(300)"
    monkeypatch.setattr(steps, "COMMAND", (sys.executable, "-c", program))
    log = tmp_path / "slow.log"

    def ask():
        while not (log.exists() and log.read_text().endswith("\n")):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=ask, daemon=True).start()
    with pytest.raises(Terminated):
        steps.run("slow", ["x"], log, 60.0)
    with pytest.raises(ProcessLookupError):
        os.kill(int(log.read_text()), 0)


@pytest.fixture
def command(tmp_path, monkeypatch):
    """A command of a night that looks at a, b and c, a second each, or as a unit's file says, and calls `wrong` wrong."""
    program = """
import pathlib, sys, time
from parity.results.turns import RIGHT, WRONG, Turns
turns = Turns.read(pathlib.Path(sys.argv[sys.argv.index("--turns") + 1]))
for unit in turns.order("abc"):
    turns.begin(unit)
    slow = pathlib.Path("slow-" + unit)
    time.sleep(float(slow.read_text()) if slow.exists() else 0)
    wrong = pathlib.Path("wrong-" + unit).exists()
    turns.end(unit, WRONG if wrong else RIGHT)
    print(unit, "is", "WRONG" if wrong else "right", flush=True)
"""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(steps, "COMMAND", (sys.executable, "-c", program))
    return lambda limit=3.0: steps.part("history", ["history"], tmp_path / "reports", limit)


def test_a_command_that_was_cut_counts_as_far_as_it_came_and_goes_on_the_next_night(command, tmp_path):
    (tmp_path / "slow-b").write_text("60")
    (tmp_path / "wrong-a").touch()
    done = command()
    assert done.exit_code == 1 and "1 of 3" in done.reached and "2 of them never yet" in done.reached
    assert done.verdict.startswith("RED, but its time was over") and "wrong: a, looked at 20" in done.tail
    (tmp_path / "wrong-a").unlink()
    (tmp_path / "slow-a").write_text("60")
    done = command()
    assert "c is right" in done.tail, "what was not begun comes first"
    assert done.exit_code == 1 and "wrong: a, looked at 20" in done.tail, "wrong until it is right"
    for path in tmp_path.glob("slow-*"):
        path.unlink()
    done = command()
    assert (done.exit_code, done.reached, done.verdict) == (0, "", "as expected")


def test_a_command_that_had_no_time_for_anything_is_not_green(command, tmp_path):
    for unit in "abc":
        (tmp_path / f"slow-{unit}").write_text("60")
    done = command(1.5)
    assert done.exit_code is None and "0 of 3" in done.verdict and not done.whole
    for unit in "abc":
        (tmp_path / f"slow-{unit}").unlink()
    assert command().exit_code == 0
    (tmp_path / "slow-b").write_text("60")
    for _ in range(steps.TRIES):
        done = command()
    assert done.exit_code is None and "never at an end: b" in done.reached


def test_a_command_that_failed_by_itself_is_not_called_short_of_time(command, tmp_path):
    assert command().exit_code == 0
    (tmp_path / "slow-b").write_text("no number")
    done = command()
    assert (done.exit_code, done.reached, done.verdict) == (1, "", "RED") and "ValueError" in done.tail


def test_a_run_that_was_killed_before_its_first_line_had_no_time(tmp_path, monkeypatch):
    program = """
import pathlib, sys, time
folder = pathlib.Path(sys.argv[sys.argv.index("--reports") + 1])
folder.mkdir(parents=True)
(folder / "results.ndjson").touch()
time.sleep(60)
"""
    monkeypatch.setattr(steps, "COMMAND", (sys.executable, "-c", program))
    done = steps.part("unsloth", ["run"], tmp_path, 1.5)
    assert (tmp_path / "unsloth" / "results.ndjson").exists() and done.exit_code is None and not done.whole


def test_a_run_that_was_killed_before_its_report_shows_what_it_had_found(tmp_path, monkeypatch):
    """The page of an upgrade check said that something was wrong, and then 24 lines of progress."""
    where = {
        "family": "policy",
        "case": "policy-1",
        "dtype": "fp32",
        "device": "cpu",
        "replay": "parity replay policy-1",
    }
    wrong = {"quantity": "loss", "verdict": "disagree", "cls": "logic", "gate": "scalar", "headroom": 9.0}
    row = Row(implementation="lib.loss", gates={"scalar": 9.0}, settings={"B": 1}, run="r", **where, **wrong)
    head = Header(run="r", header=About(profile="pr", plan={"policy drawn 0": 9}, ends=True))
    kept = "".join(json.dumps(one.to_json()) + "\n" for one in (head, row))
    program = f"""
import pathlib, sys, time
folder = pathlib.Path(sys.argv[sys.argv.index("--reports") + 1])
folder.mkdir(parents=True)
(folder / "results.ndjson").write_text({kept!r})
for number in range(30): print(number, "s: of 99 cases", flush=True)
time.sleep(60)
"""
    monkeypatch.setattr(steps, "COMMAND", (sys.executable, "-c", program))
    done = steps.part("unsloth", ["run"], tmp_path, 3.0)
    assert done.exit_code == 1 and done.reached
    assert done.tail.splitlines() == [
        "29 s: of 99 cases",
        "new      lib.loss: disagree in loss; 1 case; parity replay policy-1",
    ]


def test_a_step_of_another_module(tmp_path):
    step = steps.run("cuda", ["--version"], tmp_path / "log", 60.0, module="pytest")
    assert step.exit_code == 0 and step.command == "pytest --version" and "pytest" in step.tail


def test_a_step_hands_on_its_exit_code(tmp_path):
    step = steps.run("list", ["list", "--family", "nothing"], tmp_path / "list.log", 120.0)
    assert (step.exit_code, step.verdict) == (2, "wrong usage") and "unknown" in step.tail


def test_a_whole_short_night_and_the_next_one(tmp_path):
    words = ["nightly", "--profile", "quick", "--family", "logprobs", "--implementation", "fixes.selective_log_probs"]
    words += [
        "--skip",
        "history",
        "--skip",
        "mutants",
        "--skip",
        "unsloth",
        "--skip",
        "upstream",
        "--skip",
        "sweep",
        "--max-time",
        "4m",
        "--seed",
        "5",
        "--reports",
        str(tmp_path),
    ]
    first = CliRunner().invoke(main, words)
    assert first.exit_code == 0, first.output
    assert json.loads((tmp_path / "heartbeat.json").read_text())["state"] == "done"
    assert (tmp_path / "index.html").exists() and "green" in (tmp_path / "issue.md").read_text()
    nights = ["notify", "--profile", "quick", "--reports", str(tmp_path)]
    assert "no run of profile nightly was ever kept here" in CliRunner().invoke(main, nights[:1] + nights[3:]).output
    told = CliRunner().invoke(main, [*nights, "--out", str(tmp_path / "text.md")])
    assert told.exit_code == 0 and told.output.startswith("parity: green")
    seen = CliRunner().invoke(main, ["history-of", "fixes.selective_log_probs", "--reports", str(tmp_path)])
    assert seen.exit_code == 0 and "quick" in seen.output
    late = CliRunner().invoke(main, [*nights, "--stale", "0s"])
    assert late.exit_code == 3 and "no night" in late.output


@pytest.fixture
def played(tmp_path, monkeypatch):
    """A night of logprobs in a second: its workers pretend, its other commands are written down; versions are the test's."""
    told = {"trl": "1.0", "liger-kernel": "0.8"}
    asked = []

    def step(name, words, log, limit, module):
        asked.append(words)
        return steps.CommandOutcome(name, "parity " + " ".join(words), 0, 1.0, "what it found")

    monkeypatch.setattr(supervisor, "interpreter", lambda target: [sys.executable, "-S", str(PLAYED)])
    monkeypatch.setattr(night, "proof", lambda *_: [proof.Proof("policy", "cpu", "kl-sign", True, 9, True)])
    monkeypatch.setattr(steps, "run", step)
    for module in (provenance, night):
        monkeypatch.setattr(module, "versions", lambda: dict(told))
    monkeypatch.setattr(findings, "_cases", lambda found: [(0, 40, {}) for _ in found])

    def one(**options):
        given = {"profile": "quick", "families": ("logprobs",), "implementations": ("fixes",), "reports": tmp_path}
        given["others"] = (("history", ("history",), 0.2), ("mutants", ("mutants",), 0.1))
        asked.clear()
        code, changed = night.run(night.Night(**given | options), lambda line: None, lambda *_: None)
        return code, notify.title(changed) if changed else "", list(asked)

    return one, told


def yesterday(reports):
    """Let the runs that are kept be of one day earlier."""
    for path in (reports / "history").glob("*.sqlite"):
        with contextlib.closing(sqlite3.connect(path)) as base, base:
            base.execute("UPDATE run SET started = datetime(started, '-1 day') || '+00:00'")


def test_green_red_still_red_and_green_again(played, tmp_path, monkeypatch):
    run, versions = played
    code, title, asked = run()
    assert (code, [words[0] for words in asked]) == (0, ["history", "mutants"]) and "green" in title
    assert (code, title) == (run()[0], run()[1]), "a night without a cause is as the one before"
    yesterday(tmp_path)
    monkeypatch.setenv("PLAYED_WRONG", "fused")
    versions["trl"] = "2.0"
    code, title, asked = run()
    assert code == 1 and title == "parity: 1 new finding in fused, since tonight"
    words = ["bisect", "trl", "--good", "1.0", "--bad", "2.0", "--case", asked[0][7], "--implementation", "fused"]
    assert asked[0] == [*words, "--reports", str(tmp_path)] and asked[0][7].startswith("logprobs-")
    issue = (tmp_path / "issue.md").read_text()
    assert "trl 1.0 → 2.0" in issue and "parity bisect trl" in issue and "what it found" in issue
    yesterday(tmp_path)
    code, title, asked = run()
    assert code == 1 and "since yesterday, " in title
    assert not any(words[0] == "bisect" for words in asked), "on the first red night only"
    monkeypatch.setenv("PLAYED_WRONG", "plain")
    code, title, asked = run()
    assert (
        title == "parity: 1 new finding in plain, since tonight" and "Gone since" in (tmp_path / "issue.md").read_text()
    )
    assert not any(words[0] == "bisect" for words in asked), "another finding of a release that was searched"
    monkeypatch.delenv("PLAYED_WRONG")
    assert run()[:2] == (0, title[: title.index(":")] + f": green ({datetime.datetime.now(datetime.UTC):%Y-%m-%d})")


def test_a_night_whose_time_was_over_can_be_green(played, tmp_path, monkeypatch):
    run, _ = played
    monkeypatch.setenv("PLAYED_SECONDS", "0.02")
    code, title, _ = run(max_time=3.0, profile="nightly")
    header, rows = read(tmp_path / "results.ndjson")
    assert rows and not header.end.complete, "it had time for all"
    assert code == 0 and title == f"parity: green ({datetime.datetime.now(datetime.UTC):%Y-%m-%d})"
    (kept,) = memory.runs(tmp_path / "history")
    assert kept.green and not kept.whole and any("the time was over: logprobs after" in r for r in kept.reasons)
    assert "the time was over: logprobs after" in (tmp_path / "issue.md").read_text()


def test_a_night_that_died_in_its_commands_is_not_green(played, tmp_path, monkeypatch):
    run, _ = played

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(steps, "run", killed)
    with pytest.raises(KeyboardInterrupt):
        run()
    told = CliRunner().invoke(main, ["notify", "--profile", "quick", "--reports", str(tmp_path)])
    assert told.exit_code == 1 and "it did not come to its end" in told.output.splitlines()[0]


def told(reports, *more):
    """The exit code of `parity notify` and the title that it prints."""
    done = CliRunner().invoke(main, ["notify", "--profile", "quick", "--reports", str(reports), *more])
    return done.exit_code, next(line for line in done.output.splitlines() if not line.startswith("parity: left out"))


def beat(reports, **changed):
    """Let the last sign of life be another one."""
    path = reports / "heartbeat.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))


def test_a_night_that_died_in_its_long_run_alarms_at_once(played, tmp_path, monkeypatch):
    run, _ = played
    run()
    yesterday(tmp_path)
    assert told(tmp_path) == (0, f"parity: green ({datetime.date.today() - datetime.timedelta(1)})")

    def dies(*_):
        raise MemoryError

    monkeypatch.setattr(supervisor, "run", dies)
    with pytest.raises(MemoryError):
        run()
    code, title = told(tmp_path)
    assert code == 3 and title.startswith("parity: no night: the night of ") and "died" in title
    assert told(tmp_path, "--profile", "nightly")[1].startswith("parity: no night: no run of profile nightly"), (
        "another"
    )

    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as other:
        beat(tmp_path, pid=other.pid)
        assert told(tmp_path)[0] == 0, "it is under way: yesterday's verdict holds"
        with pytest.raises(UsageError, match=f"process {other.pid} has a night under way"):
            run()
        beat(tmp_path, until=time.time() - 1)
        assert told(tmp_path)[0] == 3, "it hangs"
        beat(tmp_path, until=time.time() + 60)
        other.kill()
    assert told(tmp_path)[0] == 3
    beat(tmp_path, host="elsewhere", pid=1)
    assert told(tmp_path)[0] == 0, "a process of another machine cannot be looked up"
    beat(tmp_path, until=time.time() - 1)
    assert told(tmp_path)[0] == 3
    (tmp_path / "night.json").write_text("{")
    code, title = told(tmp_path)
    assert code == 3 and "night.json" in title


def test_a_night_under_way_is_not_yet_red(played, tmp_path, monkeypatch):
    run, _ = played
    run()
    yesterday(tmp_path)
    seen = []

    def step(name, *_):
        with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as other:
            beat(tmp_path, pid=other.pid)
            seen.append(told(tmp_path)[0])
            other.kill()
        return steps.CommandOutcome(name, "", 0, 1.0, "")

    monkeypatch.setattr(steps, "run", step)
    run()
    assert seen == [0, 0] and told(tmp_path)[0] == 0


def test_a_night_without_proof_of_life_or_whose_file_is_lost_alarms(played, tmp_path, monkeypatch):
    run, _ = played
    run()
    path = max((tmp_path / "history").glob("*.sqlite"))
    yesterday(tmp_path)
    run()
    last = max((tmp_path / "history").glob("*.sqlite"), key=lambda p: p.stat().st_mtime)
    assert last != path and told(tmp_path)[0] == 0
    last.write_bytes(b"")
    code, title = told(tmp_path)
    assert code == 3 and "is not there or unreadable" in title
    blind = proof.Proof("policy", "cpu", "kl-sign", caught=False, cases=120, innocent=True)
    monkeypatch.setattr(night, "proof", lambda *_: [blind])
    assert run()[0] == 3
    code, title = told(tmp_path)
    assert code == 3 and "ended with 3" in title and "NOT caught" in title


@pytest.mark.parametrize("content", [b"", b"no such thing"])
def test_a_damaged_file_of_an_earlier_night_costs_no_verdict(played, tmp_path, content):
    run, _ = played
    run()
    yesterday(tmp_path)
    (old,) = (tmp_path / "history").glob("*.sqlite")
    old.write_bytes(content)
    for name in ("run", "history"):
        (tmp_path / "turns").mkdir(exist_ok=True)
        (tmp_path / "turns" / f"{name}.json").write_bytes(content)
    code, title, _ = run()
    assert code == 0 and "green" in title
    issue = (tmp_path / "issue.md").read_text()
    assert old.name in issue and "run.json" in issue and "history.json" in issue and "set aside" in issue
    page = _page(tmp_path)
    assert old.name in page
    assert json.loads((tmp_path / "turns" / "run.json").read_text())["units"] is not None
    code, title, _ = run()
    assert code == 0 and old.name in (tmp_path / "issue.md").read_text()
    assert "run.json" not in (tmp_path / "issue.md").read_text(), "said once"


def test_a_command_that_leaves_something_unreadable_counts_by_its_exit_code(tmp_path, monkeypatch):
    program = """
import pathlib, sys
folder = pathlib.Path(sys.argv[sys.argv.index("--reports") + 1])
folder.mkdir(parents=True)
(folder / "results.ndjson").write_text("no rows\\n")
sys.exit(1)
"""
    monkeypatch.setattr(steps, "COMMAND", (sys.executable, "-c", program))
    done = steps.part("unsloth", ["run"], tmp_path, 60.0)
    assert (done.exit_code, done.verdict) == (1, "RED") and "results.ndjson line 1" in done.tail


def test_a_night_that_goes_on_does_not_count_itself_among_the_past(played, tmp_path, monkeypatch):
    run, _ = played
    run()
    yesterday(tmp_path)
    shared = night.budget.parts
    seen = []
    monkeypatch.setattr(night.budget, "parts", lambda past, *a: seen.append(past) or shared(past, *a))
    monkeypatch.setattr(night.budget, "families", lambda past, *_: seen.append(past) or {})
    whole = steps.run

    def stops(*_):
        raise MemoryError

    monkeypatch.setattr(steps, "run", stops)
    with pytest.raises(MemoryError):
        run()
    monkeypatch.setattr(steps, "run", whole)
    run(resume=True)
    assert [[one.id for one in past] for past in seen] == [[seen[0][0].id]] * 4 and len(seen[0]) == 1


def test_a_command_that_was_cut_or_red_is_said_wherever_the_night_is(played, tmp_path, monkeypatch):
    run, _ = played
    told = {"history": (0, "9 of 43"), "mutants": (0, "")}

    def step(name, words, log, limit, module):
        code, reached = told[name]
        return steps.CommandOutcome(name, "parity " + " ".join(words), code, 60.0, "<q>of the log", reached)

    monkeypatch.setattr(steps, "run", step)
    code, title, _ = run()
    assert code == 0 and title.endswith(", as far as there was time for history")
    for place in ("issue.md", "page"):
        text = _page(tmp_path) if place == "page" else (tmp_path / place).read_text()
        assert "as expected, but its time was over: 9 of 43" in text, place
        assert "parity mutants" in text, place
    yesterday(tmp_path)
    told["mutants"] = (1, "")
    code, title, _ = run()
    assert code == 1 and title.endswith("): mutants: RED")
    assert "<q>" not in _page(tmp_path) and "of the log" in _page(tmp_path), "what a red command printed last"
    again = CliRunner().invoke(main, ["report", str(tmp_path / "results.ndjson")]).output
    there = ["report", str(tmp_path / "results.ndjson"), "--reports", str(tmp_path / "elsewhere")]
    for text in (again, CliRunner().invoke(main, there).output, (tmp_path / "summary.md").read_text()):
        assert "he run ended with 1" in text and "mutants: RED" in text, "its long run alone ended with 0"
    nights = ["notify", "--profile", "quick", "--reports", str(tmp_path)]
    assert "of the log" in CliRunner().invoke(main, nights).output, "the issue of a runner is made from what was kept"
    yesterday(tmp_path)
    told["history"] = (None, "")
    code, title, _ = run()
    assert code == 3 and title.endswith("): history: stopped: its time was over")


def _page(reports):
    header, rows = read(reports / "results.ndjson")
    (run,) = (run for run in memory.runs(reports / "history", str) if run.id == header.run)
    show.report(header, rows, reports, list(run.reasons), run.exit_code)
    return (reports / "index.html").read_text()


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
        memory.Seen(name, name, "logprobs", "disagree", None, None, "", None, 1, None, "", "parity replay x.json")
        for name in ("kernel.py:loss", "trl.loss", "kernel.py:other")
    ]
    for found, name in ((seen, "trl.loss"), (seen[:1], "kernel.py:loss")):
        red = dataclasses.replace(green, id="red", exit_code=1, findings=found, versions=versions | {"trl": "2.0"})
        (words,) = night.bisects(trend.change(red, [green]), tmp_path)
        assert words[words.index("--implementation") + 1] == name


@pytest.mark.parametrize("verdict, more", [("crashed", ["--failure", "crashed"]), ("disagree", [])])
def test_a_search_asks_for_what_the_finding_is(played, tmp_path, verdict, more):
    run, versions = played
    run()
    (green,) = memory.runs(tmp_path / "history")
    seen = memory.Seen("k", "fused", "logprobs", verdict, None, None, "", None, 1, None, "", "parity replay x.json")
    red = dataclasses.replace(green, id="red", exit_code=1, findings=(seen,), versions=versions | {"trl": "2.0"})
    (words,) = night.bisects(trend.change(red, [green]), tmp_path)
    assert words[6:-6] == more and words[-6:-4] == ["--case", "x.json"]


def test_what_a_fresh_process_does_not_show_is_nondeterministic(played, tmp_path, monkeypatch):
    monkeypatch.setenv("PLAYED_WRONG", "fused")
    for shown, verdict in (("yes", "disagree"), ("no", "nondeterministic")):
        monkeypatch.setenv("PLAYED_SHOWN", shown)
        assert played[0]()[0] == 1
        _, rows = read(tmp_path / "results.ndjson")
        assert {row.verdict for row in rows if row.implementation == "fused"} == {verdict}
        assert {row.verdict for row in rows if row.implementation == "plain"} == {"agree"}


def test_a_night_that_was_killed_goes_on(played, tmp_path, monkeypatch):
    run, _ = played
    run(seed=7)
    expected = rows_of(tmp_path)
    whole, events = steps.run, supervisor.run

    def dies(*args):
        yield from itertools.islice(events(*args), 200)
        raise MemoryError

    def stops(name, *args):
        if name == "mutants":
            raise MemoryError
        return whole(name, *args)

    with pytest.raises(UsageError, match="came to its end with exit code 0: begin a new one"):
        run(resume=True)

    def interrupted(*args):
        yield from itertools.islice(events(*args), 9)
        raise KeyboardInterrupt

    monkeypatch.setattr(supervisor, "run", interrupted)
    given = night.Night(profile="quick", families=("logprobs",), implementations=("fixes",), reports=tmp_path, seed=7)
    assert night.run(given, lambda line: None, lambda *_: None) == (130, None), "nothing more is done"
    monkeypatch.setattr(supervisor, "run", dies)
    with pytest.raises(MemoryError):
        run(resume=True)
    monkeypatch.setattr(supervisor, "run", events)
    monkeypatch.setattr(steps, "run", stops)
    with pytest.raises(MemoryError):
        run(resume=True)
    assert rows_of(tmp_path) == expected, "the run has gone on and ended"
    monkeypatch.setattr(steps, "run", whole)
    monkeypatch.setattr(supervisor, "run", lambda plans, deck, *_: iter(()) if not deck.left else pytest.fail("again"))
    with pytest.raises(UsageError, match="that night had seed 7, not 8"):
        run(resume=True, seed=8)
    code, title, asked = run(resume=True)
    assert code == 0 and "green" in title and [words[0] for words in asked] == ["mutants"]
    assert rows_of(tmp_path) == expected and json.loads((tmp_path / "night.json").read_text())["seed"] == 7


def test_a_night_on_a_cluster_needs_ray(played, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match="--ray: Ray is not installed: pip install"):
        played[0](ray="auto")


def rows_of(reports):
    return sorted((r.case, r.implementation, r.quantity or "", r.verdict) for r in read(reports / "results.ndjson")[1])


def test_a_run_that_is_out_of_time_says_where_it_stopped(tmp_path):
    words = ["run", "--family", "logprobs", "--implementation", "fixes.selective_log_probs", "--max-time", "1s"]
    done = subprocess.run(
        [sys.executable, "-m", "parity", *words, "--reports", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert "the time was over: logprobs after" in done.stdout, done.stdout + done.stderr
    header = json.loads((tmp_path / "results.ndjson").read_text().partition("\n")[0])
    assert header["header"]["profile"] == "pr"
