"""A night's other commands: their time, what counts of a cut one, their exit codes."""

import os
import signal
import sys
import threading
import time

import pytest

from cases.selftest.results.runs import row
from parity.nightly import steps
from parity.process import Terminated
from parity.results.report.rows import Writer
from parity.results.row import About, Header


def test_a_step_ends_with_its_time(tmp_path, monkeypatch):
    program = "import time; print('here', flush=True); time.sleep(60)"
    monkeypatch.setattr(steps, "COMMAND", (sys.executable, "-c", program))
    begun = time.monotonic()
    step = steps.run("slow", ["x"], tmp_path / "slow.log", 2.0)
    assert step.exit_code is None and step.tail == "here" and time.monotonic() - begun < 40


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
def ran(tmp_path, monkeypatch):
    """A function: what comes of a run that leaves this in its file, then does that, in so many seconds."""

    def part(content, then, limit):
        program = (
            "import pathlib, sys, time\nfolder = pathlib.Path(sys.argv[sys.argv.index('--reports') + 1])\n"
            f"folder.mkdir(parents=True)\n(folder / 'results.ndjson').write_text({content!r})\n{then}"
        )
        monkeypatch.setattr(steps, "COMMAND", (sys.executable, "-c", program))
        done = steps.part("unsloth", ["run"], tmp_path, limit)
        assert (tmp_path / "unsloth" / "results.ndjson").exists()
        return done

    return part


def test_a_run_that_was_killed_before_its_first_line_had_no_time(ran):
    done = ran("", "time.sleep(60)", 1.5)
    assert done.exit_code is None and not done.whole


@pytest.mark.parametrize("killed", [True, False])
def test_a_run_shows_all_that_it_found_killed_before_its_report_or_not(tmp_path, ran, killed):
    """The page of an upgrade check said that something was wrong, and then 24 lines of progress; another one lacked the first two
    of five findings, which its report had more than 24 lines before its end."""
    with Writer(tmp_path / "kept") as write:
        write(Header(run="r", header=About(profile="pr", plan={"policy drawn 0": 9}, ends=True)))
        write(row(verdict="disagree", headroom=9.0))
    then = "for number in range(30): print(number, 's: of 99 cases', flush=True)\n"
    then += "time.sleep(60)" if killed else "sys.exit(1)"
    done = ran((tmp_path / "kept").read_text(), then, 3.0 if killed else 60.0)
    assert done.exit_code == 1 and done.reached
    found = "new      lib.loss: logic in loss; 1 case; parity replay policy-1"
    if killed:
        assert done.tail.splitlines() == ["29 s: of 99 cases", found]
    else:
        assert done.tail.splitlines() == [found, *(f"{number} s: of 99 cases" for number in range(6, 30))]


def test_a_command_that_leaves_something_unreadable_counts_by_its_exit_code(ran):
    done = ran("no rows\n", "sys.exit(1)", 60.0)
    assert (done.exit_code, done.verdict) == (1, "RED") and "results.ndjson line 1" in done.tail


def test_a_step_of_another_module(tmp_path):
    step = steps.run("cuda", ["pytest", "--version"], tmp_path / "log", 60.0)
    assert step.exit_code == 0 and step.command == "pytest --version" and "pytest" in step.tail
