"""A run that did not finish says so: in its file, in every report and in its exit code; one folder is one run's."""

import json
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from msgspec import UNSET
from msgspec.structs import replace

from cases.selftest.results import runs
from parity import data
from parity.cli.commands import main
from parity.errors import AGREE, NEW, NOTHING, STALE, UsageError
from parity.results.report import render
from parity.results.report.rows import Writer, read
from parity.results.report.summary import summarise
from parity.results.row import About, End, Header, Last, Part, Parted
from parity.running import run as running
from parity.running.outcome import judge_run
from parity.running.plan import At, Judged, Options, Shard

ABOUT = About(device="cpu", profile="quick", seed=1, ends=True)
HEADER = Header(run="aa", header=ABOUT)
PLANNED = Header(run="aa", header=replace(ABOUT, plan={"a": 40, "b": 50}))
PART = Parted(part=Part(name="a", cases=40), run="aa")


def row(**fields):
    base = {"case": "logprobs-1", "quantity": "logps", "family": "logprobs", "run": "aa", "settings": {"V": 3}}
    return runs.row(**base | {"implementation": "trl.selective_log_softmax"} | fields)


def file_of(path, *records):
    with Writer(path) as write:
        for record in records:
            write(record)
    return path


def end(**fields):
    return Last(end=End(**{"cases": 12, "of": 340, "complete": False, "exit_code": 130} | fields), run="aa")


def test_a_report_gives_the_reasons_of_the_exit_code(tmp_path):
    """Of a part of the implementations too, of which no history is kept."""
    stale = "ledger entry mine no longer reproduces, its case agrees: mine.toml line 3"
    ended = end(cases=340, complete=True, exit_code=4, reasons=[stale])
    path = file_of(tmp_path / "results.ndjson", HEADER, row(), ended)
    done = CliRunner().invoke(main, ["report", str(path), "-v"])
    assert stale in " ".join(done.output.split()), done.output


@pytest.mark.parametrize(
    ("records", "says"),
    [
        ((HEADER, row(), end()), "interrupted: stopped after 12 of 340 cases"),
        ((HEADER, row()), "the file ends before the run did"),
        ((PLANNED, row(shard="a"), PART, row(shard="b")), "stopped after 41 of 90 cases"),
    ],
    ids=["interrupted", "killed, by an older parity", "killed"],
)
def test_every_report_says_that_a_run_did_not_finish(tmp_path, records, says):
    path = file_of(tmp_path / "results.ndjson", *records)
    done = CliRunner().invoke(main, ["report", str(path)])
    assert done.exit_code == 3
    assert says in " ".join(done.output.split())
    assert "0 new so far" in " ".join(done.output.split())
    summary = summarise(*read(path))
    assert all(says in text for text in (render.markdown(summary), render.page(summary), render.junit(summary)))
    assert 'errors="1"' in render.junit(summary)


def test_a_run_that_finished_and_an_older_file_are_whole(tmp_path):
    older = Header(run="aa", header=replace(ABOUT, ends=UNSET))
    for number, records in enumerate([(HEADER, row(), end(complete=True, exit_code=0)), (older, row())]):
        path = file_of(tmp_path / f"{number}.ndjson", *records)
        assert summarise(*read(path)).incomplete == ""
        assert CliRunner().invoke(main, ["report", str(path)]).exit_code == 0


def test_rows_of_two_runs_in_one_file_are_refused(tmp_path):
    path = file_of(tmp_path / "results.ndjson", HEADER, row(), replace(PART, run="bb"))
    with pytest.raises(UsageError, match=r"results.ndjson line 4: a row of run bb under the header of run aa"):
        read(path)


@pytest.mark.parametrize(("raised", "code"), [(KeyboardInterrupt, 130), (running.Terminated, 143)])
def test_what_there_is_when_it_is_stopped_is_reported(tmp_path, monkeypatch, raised, code):
    def events(plans, queue, *limits):
        shard = queue.take()
        yield shard, At(1)
        yield shard, Judged(row(run=""))
        raise raised

    monkeypatch.setattr(running.supervisor, "run", events)
    found = running.execute(Options(profile="quick", reports=tmp_path), lambda *args: None)
    assert found.exit_code == code
    assert found.reasons[0].startswith("stopped after 1 of ")
    header, rows = read(tmp_path / "results.ndjson")
    assert header.end.complete is False and len(rows) == 1
    assert json.loads((tmp_path / "results.ndjson").read_text().splitlines()[-1])["end"]["exit_code"] == code


def test_no_terminal_changes_how_a_run_ends(tmp_path):
    path = file_of(tmp_path / "results.ndjson", HEADER, row(message="×"), end(complete=True, exit_code=0))
    command = [sys.executable, "-m", "parity", "report", str(path), "-v"]
    env = {"COLUMNS": "0", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(command, env=os.environ | env, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")


def test_what_cannot_be_written_is_a_sentence(tmp_path):
    path = file_of(tmp_path / "results.ndjson", HEADER, row(), end(complete=True, exit_code=0))
    (tmp_path / "index.html").mkdir()
    done = CliRunner().invoke(main, ["report", str(path)])
    assert done.exit_code == 2 and f"parity: {tmp_path / 'index.html'}: Is a directory" in done.output
    full = ["bash", "-c", f"ulimit -f 1; exec {sys.executable} -m parity report {path} --reports {tmp_path / 'full'}"]
    ran = subprocess.run(full, capture_output=True, text=True)
    assert ran.returncode == 2 and re.search("^parity: .*File too large\n$", ran.stderr), ran.stderr
    done = CliRunner().invoke(main, ["run", "--max-time", "99999999999h"])
    assert done.exit_code == 2 and "time '99999999999h' is longer than there is" in done.output


def test_a_library_that_is_not_installed_has_one_row():
    gone = {"verdict": "unsupported", "quantity": None, "message": "gone is not installed: pip install gone"}
    told = [row(case=f"logprobs-{n}", implementation=name, **gone) for n in range(3) for name in ("gone.a", "gone.b")]
    told += [row(case="logprobs-9", verdict="unsupported", quantity=None, message="no bias parameter")] * 2
    state, written = running.RunResult(replace(HEADER)), []
    events = ((Shard(family="logprobs", kind="drawn", seed=1, count=9), Judged(one)) for one in told)
    running._follow(state, events, SimpleNamespace(fresh=True), written.append, lambda *_: None, print)
    assert [one.implementation for one in state.rows] == ["gone.a", "gone.b", *[told[-1].implementation] * 2]
    assert len(written) == 4


@pytest.mark.parametrize(("known", "code"), [(None, NEW), ("entry", NOTHING)])
def test_what_is_required_is_excused_by_a_new_crash_alone(known, code):
    rows = [runs.row(f"c{n}", family="logprobs") for n in range(5)]
    rows.append(runs.row("c9", None, "crashed", family="logprobs", known=known))
    options = Options(require=("lib.loss:cpu",))
    assert judge_run(options, rows, [], "cpu")[0] == code


def test_an_idle_function_ends_a_run_with_3_beside_a_new_finding():
    """The table of exit codes says so; the finding is among the reasons."""
    rows = [runs.row("c", verdict="disagree", implementation="lib.loss")]
    code, reasons = judge_run(Options(require=("lib.other",)), rows, [], "cpu")
    assert code == NOTHING and "1 new failing rows of lib.loss" in reasons
    page = data.cases_dir().parent / "docs" / "reading-a-report.md"
    assert "of several codes 3 wins, then 1" in page.read_text()


@pytest.mark.parametrize(
    ("name", "code"),
    [("trl.selective_log_softmax", AGREE), ("trl.selective_log_softmix", STALE), ("mine.py:loss", AGREE)],
)
def test_an_entry_whose_implementation_is_not_there_is_stale(tmp_path, name, code):
    case = str(data.cases_dir() / "regressions" / "one-token.json")
    path = runs.ledger_of(tmp_path / "ledger.toml", {"implementations": [name], "case": case})
    found, reasons = judge_run(Options(ledger=path), [runs.row("c", family="logprobs")], [], "cpu")
    assert found == code
    said = [f"ledger entry one: there is no implementation {name}: {path} line 3"]
    assert reasons == (said if code == STALE else [])
