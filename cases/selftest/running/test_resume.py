"""A run that is killed goes on with no row lost or twice, whoever runs its shards; parts of several machines are one run."""

import collections
import multiprocessing
import random
import sys
import tempfile
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from msgspec import UNSET
from msgspec.structs import replace

from parity.case.case import Case
from parity.cli.commands import main
from parity.errors import UsageError
from parity.results.report.rows import read, rewrite
from parity.running import run as running
from parity.running import supervisor
from parity.running.plan import Options

PLAYED = Path(supervisor.__file__).parents[2] / "fixtures" / "played_worker.py"


@pytest.fixture
def options(tmp_path, monkeypatch):
    """Options of a small run whose workers only pretend: 7 shards, 93 cases, in a tenth of a second."""
    monkeypatch.setattr(supervisor, "interpreter", lambda target: [sys.executable, "-S", str(PLAYED)])
    small = {"profile": "quick", "families": ("logprobs",), "implementations": ("fixes",), "device": "cpu"}
    return Options(**small, reports=tmp_path / "a", workers=2)


def execute(options):
    return running.execute(options, lambda *_: None)


def rows_of(path):
    """Every row of a file as often as it is there; what a run or a second one of it may have of its own is left out."""
    header, rows = read(path)
    return header, collections.Counter(repr(replace(r, run="", replay="", shard=UNSET)) for r in rows)


def killed(options, seconds):
    """A run of its own process, killed after so many seconds; whether it had come to its end before."""
    process = multiprocessing.get_context("fork").Process(target=execute, args=(options,))
    process.start()
    process.join(seconds)
    process.kill()
    process.join()
    assert process.exitcode in (0, -9), "it ended in an error of its own"
    return process.exitcode == 0


def test_a_run_that_is_killed_at_any_moment_goes_on_without_losing_a_row(options, tmp_path):
    execute(options)  # imports
    begun = time.monotonic()
    execute(options)
    whole, took = options.reports / "results.ndjson", time.monotonic() - begun
    header, expected = rows_of(whole)
    assert header.end.complete and set(expected.values()) == {1} and header.end.of == sum(header.header.plan.values())
    moments, kills = random.Random(4), 0
    for number in range(3):
        path = tmp_path / f"killed-{number}" / "results.ndjson"
        again = Options(**vars(options) | {"reports": path.parent})
        for _ in range(3):
            kills += not killed(again, moments.uniform(0.3, 1.0) * took)
            if path.exists() and path.read_bytes().count(b"\n"):
                again = Options(resume=path)
                if not read(path)[0].end:
                    done = CliRunner().invoke(main, ["report", str(path)])
                    assert done.exit_code == 3, "half a run passes for a whole one"
        execute(again)
        header, rows = rows_of(path)
        assert rows == expected and header.end.complete
    assert kills, "it was never killed"


def test_rows_depend_on_no_worker_and_none_leaves_a_folder(options, tmp_path, monkeypatch):
    found, own = [], tmp_path / "temporary"
    own.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(own))
    monkeypatch.setenv("TMPDIR", str(own))
    for workers, dies in ((1, False), (2, False), (3, False), (2, True)):
        if dies:
            monkeypatch.setenv("PLAYED_DIES", str(tmp_path))
        reports = tmp_path / f"{workers}-{dies}"
        done = execute(Options(**vars(options) | {"reports": reports, "workers": workers}))
        assert not done.lost and done.header.end.complete
        found.append(rows_of(reports / "results.ndjson")[1])
    assert list(tmp_path.glob("died-*")), "no worker died"
    assert not list(own.glob("parity-*"))
    assert found[0] == found[1] == found[2] == found[3]


@pytest.mark.parametrize(("confirm", "shown"), [(False, "no"), (True, "yes"), (True, "no")])
def test_a_new_finding_is_told_once_as_soon_as_it_counts(options, monkeypatch, confirm, shown):
    monkeypatch.setenv("PLAYED_WRONG", "fused")
    monkeypatch.setenv("PLAYED_SHOWN", shown)
    monkeypatch.setattr("parity.running.findings.case_of", lambda row: Case("logprobs", 1, "fp32", {}))
    told, at = [], []
    asked = Options(**vars(options) | {"confirm": confirm, "minimise": False})
    running.execute(asked, lambda rows, done, *_: at.append((done, len(told))), told.append)
    news = [line for line in told if line.startswith("NEW ")]
    replays = [line.partition(" · ")[2].startswith("parity replay logprobs-") for line in news]
    assert replays == [True] * (shown == "yes" or not confirm)
    if not confirm:
        assert min(done for done, lines in at if lines > 1) < 5, "it waited"


def test_where_the_time_is_limited_the_seed_says_which_checks_come_first(options, tmp_path, monkeypatch):
    monkeypatch.setenv("PLAYED_SECONDS", "0.02")
    asked = vars(options) | {"profile": "nightly", "families": ("kto-trainer", "logprobs"), "implementations": ()}
    first = []
    for night in range(3):
        one = Options(**asked | {"reports": tmp_path / str(night), "max_time": 1.5, "seed": night})
        done = execute(one)
        planned = {name for name in done.header.header.plan if "kto-trainer checks" in name}
        first.append(frozenset({part.name for part in done.header.parts} & planned))
        assert 0 < len(first[-1]) < len(planned), "it had time for all, or for none"
    assert len(set(first)) > 1


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda h: h.header.versions.update(trl="0.1"), "trl was 0.1, here it is"),
        (lambda h: setattr(h.header, "git", "0123"), "git was 0123, here it is"),
        (lambda h: h.header.asked.files.update({"x.py": "0"}), "x.py has changed since"),
        (lambda h: h.header.plan.update(more=3), "planned otherwise"),
        (lambda h: setattr(h.header, "asked", UNSET), "written by an earlier parity"),
    ],
    ids=["version", "revision", "file", "plan", "older"],
)
def test_a_run_goes_on_only_where_nothing_has_changed(options, change, says):
    execute(options)
    path = options.reports / "results.ndjson"
    header, rows = read(path)
    change(header)
    rewrite(path, header, rows)
    with pytest.raises(UsageError, match=says):
        execute(Options(resume=path))
    assert len(read(path)[1]) == len(rows), "the file is as it was"


def test_an_option_of_another_run_is_refused(options):
    execute(options)
    path = options.reports / "results.ndjson"
    for given, says in (({"seed": 5}, "seed"), ({"profile": "soak"}, "profile quick, not soak")):
        with pytest.raises(UsageError, match=f"its run had {says}.*leave the option out"):
            execute(Options(resume=path, **given))
    assert execute(Options(resume=path, profile="quick")).header.end.complete, "the same one may be given"


@pytest.mark.parametrize(
    "act", [lambda path: path.write_bytes(path.read_bytes() + b"{}\n"), lambda path: path.unlink(missing_ok=True)]
)
def test_what_is_done_to_the_file_of_a_run_is_undone_at_its_end(options, tmp_path, act):
    execute(options)
    reports = tmp_path / "b"
    running.execute(Options(**vars(options) | {"reports": reports}), lambda *_: act(reports / "results.ndjson"))
    assert rows_of(reports / "results.ndjson")[1] == rows_of(options.reports / "results.ndjson")[1]
