"""A night's other commands: their time, what counts of a cut one, their exit codes."""

import json
import os
import signal
import sys
import threading
import time

import pytest

from parity.nightly import steps
from parity.process import Terminated
from parity.results.header import About, Header
from parity.results.row import Row


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


@pytest.mark.parametrize("killed", [True, False])
def test_a_run_shows_all_that_it_found_killed_before_its_report_or_not(tmp_path, monkeypatch, killed):
    """The page of an upgrade check said that something was wrong, and then 24 lines of progress; another one lacked the first two
    of five findings, which its report had more than 24 lines before its end."""
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
time.sleep(60) if {killed} else sys.exit(1)
"""
    monkeypatch.setattr(steps, "COMMAND", (sys.executable, "-c", program))
    done = steps.part("unsloth", ["run"], tmp_path, 3.0 if killed else 60.0)
    assert done.exit_code == 1 and done.reached
    found = "new      lib.loss: disagree in loss; 1 case; parity replay policy-1"
    if killed:
        assert done.tail.splitlines() == ["29 s: of 99 cases", found]
    else:
        assert done.tail.splitlines() == [found, *(f"{number} s: of 99 cases" for number in range(6, 30))]


def test_a_step_of_another_module(tmp_path):
    step = steps.run("cuda", ["--version"], tmp_path / "log", 60.0, module="pytest")
    assert step.exit_code == 0 and step.command == "pytest --version" and "pytest" in step.tail


def test_a_step_hands_on_its_exit_code(tmp_path):
    step = steps.run("list", ["list", "--family", "nothing"], tmp_path / "list.log", 120.0)
    assert (step.exit_code, step.verdict) == (2, "wrong usage") and "unknown" in step.tail


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
