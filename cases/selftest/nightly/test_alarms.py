"""What died, was cut, is late or unreadable is said wherever somebody looks."""

import datetime
import json
import os

import pytest
from click.testing import CliRunner

from parity.cli import show
from parity.cli.commands import main
from parity.errors import UsageError
from parity.nightly import journal, night, steps
from parity.results import memory
from parity.results.report.rows import read
from parity.running import run as running
from parity.running import supervisor


def yesterday(reports):
    """Let the runs that are kept be of one day earlier."""
    for path in (reports / "history").glob("*.json"):
        kept = json.loads(path.read_text())
        earlier = datetime.datetime.fromisoformat(kept["started"]) - datetime.timedelta(days=1)
        path.write_text(json.dumps(kept | {"started": earlier.isoformat()}))


def page_of(reports):
    results = reports / "results.ndjson"
    header, rows = read(results)
    (run,) = (run for run in memory.runs(reports / "history", str) if run.id == header.run)
    show.report(header, rows, results, reports, list(run.reasons), run.exit_code)
    return (reports / "index.html").read_text()


def told(reports, *more):
    """The exit code of `parity notify` and the title that it prints."""
    done = CliRunner().invoke(main, ["notify", "--profile", "quick", "--reports", str(reports), *more])
    return done.exit_code, next(line for line in done.output.splitlines() if not line.startswith("parity: left out"))


def test_a_night_that_died_in_its_commands_is_not_green(run, tmp_path, monkeypatch):

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(steps, "run", killed)
    with pytest.raises(KeyboardInterrupt):
        run()
    told = CliRunner().invoke(main, ["notify", "--profile", "quick", "--reports", str(tmp_path)])
    assert told.exit_code == 1 and "it did not come to its end" in told.output.splitlines()[0]


def test_a_night_that_died_in_its_long_run_alarms_at_once(run, tmp_path, monkeypatch):
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
    other = told(tmp_path, "--profile", "nightly")[1]
    assert other.startswith("parity: no night: no run of profile nightly")
    with running.locked(tmp_path, journal.LOCK):
        assert told(tmp_path)[0] == 0, "it is under way: yesterday's verdict holds"
        with pytest.raises(UsageError, match=f"process {os.getpid()} writes its reports there"):
            run()
    assert told(tmp_path)[0] == 3
    results = tmp_path / "results.ndjson"
    os.utime(results, (0, 0))
    with pytest.raises(UsageError, match="killed before its long run: start a new one"):
        run(resume=True)
    (tmp_path / "night.json").write_text("{")
    code, title = told(tmp_path)
    assert code == 3 and "night.json" in title


def test_a_night_under_way_is_not_yet_red(run, tmp_path, monkeypatch):
    run()
    yesterday(tmp_path)
    seen = []

    def step(name, *_):
        seen.append(told(tmp_path)[0])
        return steps.CommandOutcome(name, "", 0, 1.0, "")

    monkeypatch.setattr(steps, "run", step)
    run()
    assert seen == [0, 0] and told(tmp_path)[0] == 0


def test_a_night_without_proof_of_life_or_whose_file_is_lost_alarms(run, tmp_path, monkeypatch):
    run()
    path = max((tmp_path / "history").glob("*.json"))
    yesterday(tmp_path)
    run()
    last = max((tmp_path / "history").glob("*.json"), key=lambda p: p.stat().st_mtime)
    assert last != path and told(tmp_path)[0] == 0
    last.write_bytes(b"")
    code, title = told(tmp_path)
    assert code == 3 and "is not there or unreadable" in title
    monkeypatch.setattr(night, "proof", lambda *_: (False, "policy on cpu: NOT caught"))
    monkeypatch.setattr(night.running, "execute", lambda *_: pytest.fail("the run began all the same"))
    assert run()[0] == 3
    code, title = told(tmp_path)
    assert code == 3 and "ended with 3" in title and "NOT caught" in title


@pytest.mark.parametrize("content", [b"", b"no such thing"])
def test_a_damaged_file_of_an_earlier_night_costs_no_verdict(run, tmp_path, content):
    run()
    yesterday(tmp_path)
    (old,) = (tmp_path / "history").glob("*.json")
    old.write_bytes(content)
    code, title, _ = run()
    assert code == 0 and "green" in title
    issue = (tmp_path / "issue.md").read_text()
    assert old.name in issue
    page = page_of(tmp_path)
    assert old.name in page
    code, title, _ = run()
    assert code == 0 and old.name in (tmp_path / "issue.md").read_text()


def test_a_command_that_was_cut_or_red_is_said_wherever_the_night_is(run, tmp_path, monkeypatch):
    told = {"history": (0, "9 of 43"), "upstream": (0, "")}

    def step(name, words, log, limit):
        code, reached = told[name]
        return steps.CommandOutcome(name, "parity " + " ".join(words), code, 60.0, "<q>of the log", reached)

    monkeypatch.setattr(steps, "run", step)
    code, title, _ = run()
    assert code == 0 and title.endswith(", as far as there was time for history")
    for place in ("issue.md", "page"):
        text = page_of(tmp_path) if place == "page" else (tmp_path / place).read_text()
        assert "as expected, but its time was over: 9 of 43" in text, place
        assert "parity upstream" in text, place
    yesterday(tmp_path)
    told["upstream"] = (1, "")
    code, title, _ = run()
    assert code == 1 and title.endswith("): upstream: RED")
    assert "<q>" not in page_of(tmp_path) and "of the log" in page_of(tmp_path), "what a red command printed last"
    again = CliRunner().invoke(main, ["report", str(tmp_path / "results.ndjson")]).output
    there = ["report", str(tmp_path / "results.ndjson"), "--reports", str(tmp_path / "elsewhere")]
    for text in (again, CliRunner().invoke(main, there).output, (tmp_path / "summary.md").read_text()):
        assert "he run ended with 1" in text and "upstream: RED" in text, "its long run alone ended with 0"
    nights = ["notify", "--profile", "quick", "--reports", str(tmp_path)]
    assert "of the log" in CliRunner().invoke(main, nights).output, "the issue of a runner is made from what was kept"
    yesterday(tmp_path)
    told["history"] = (None, "")
    code, title, _ = run()
    assert code == 3 and title.endswith("): history: stopped: its time was over")
