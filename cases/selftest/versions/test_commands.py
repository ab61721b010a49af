"""The commands about versions, on a cache of their own: what is removed, and that no failure is a traceback."""

import json
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from parity import data, decoding
from parity.cli.commands import main
from parity.results.report.wording import bisection
from parity.results.row import Row
from parity.versions import environment


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PARITY_CACHE", str(tmp_path))
    return tmp_path


def made(cache, name, days_unused):
    root = cache / "envs" / name
    environment.site_packages(root).mkdir(parents=True)
    lock = {"text": "trl==1.0.0\n", "before": "2026-04-13", "linked": []}
    manifest = root / environment._MANIFEST
    manifest.write_text(json.dumps({"lock": lock, "imports": {"trl": None, "peft": "ImportError: no"}}))
    used = time.time() - days_unused * 86400
    os.utime(manifest, (used, used))
    return root


def parity(*arguments):
    done = CliRunner().invoke(main, arguments)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done


def test_what_nobody_used_for_a_month_goes_when_another_is_made_and_what_is_in_use_stays(cache):
    old, used, young = (made(cache, name, days) for name, days in (("a-1", 40), ("a-2", 40), ("b-1", 3)))
    killed, foreign = cache / "envs" / f"{environment.BUILDING}c-1", cache / "envs" / "foreign"
    killed.mkdir()
    foreign.mkdir()
    with environment.claim(used, shared=True):
        environment.prune()
    assert not old.exists() and not killed.exists() and used.exists() and young.exists() and foreign.exists()


def test_a_cache_that_cannot_be_written_is_one_line(cache, monkeypatch):
    (cache / "file").write_text("")
    monkeypatch.setenv("PARITY_CACHE", str(cache / "file"))
    done = parity("bisect", "trl", "--good", "1.0.0", "--bad", "1.1.0", "--case", "delta")
    assert done.exit_code == 3 and done.output.count("\n") == 1
    assert f"cache folder {cache / 'file'}" in done.output


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_is_named_and_nothing_half_written_stays(tmp_path):
    page = tmp_path / "page.html"
    page.write_text("the old one")
    for wrote in (lambda: decoding.write(page, "new"), lambda: decoding.save_json(page, {"a": 1})):
        (tmp_path / f".page.html.{os.getpid()}-{threading.get_ident()}").symlink_to("/dev/full")
        with pytest.raises(OSError, match=r"No space left on device: '.*page\.html'"):
            wrote()
        assert page.read_text() == "the old one" and list(tmp_path.iterdir()) == [page]


@pytest.fixture
def searched(monkeypatch):
    """The packages that are searched, each with its check; every search finds something."""
    checks = []

    def search(package, *, check, **_):
        checks.append((package, check.__self__))
        return SimpleNamespace(text="", found=SimpleNamespace(outcome="found"))

    monkeypatch.setattr("parity.versions.bisect.search", search)
    return checks


@pytest.mark.parametrize("failure, found", [("disagree", "crashed"), ("crashed", "disagree")])
def test_a_search_may_follow_a_crash_of_a_case_among_other_reports(tmp_path, searched, failure, found):
    case = data.cases_dir() / "regressions" / "one-token.json"
    folder = tmp_path / "night" / "findings"
    folder.mkdir(parents=True)
    (folder / "mine.json").write_text(case.read_text())
    words = ["bisect", "trl", "--good", "1.0.0", "--bad", "1.1.0", "--case", "mine", "--failure", failure]
    parity(*words, "--implementation", "trl.selective_log_softmax", "--reports", str(tmp_path / "night"))
    row = {"family": "logprobs", "implementation": "trl.selective_log_softmax", "dtype": "fp32", "device": "cpu"}
    ((_, check),) = searched
    crash = Row(**row, case=check.case.id, verdict="crashed", message="as it was", settings={"V": 3})
    assert check.judged([crash]).verdict == found, "a crash is not judged unless it is what is looked for"


def test_the_line_that_compare_prints_follows_the_case_and_not_the_record_of_its_name(searched):
    line = bisection("liger-kernel", "0.6.0", "0.7.0", "is-ratio", "trl.GRPOTrainer", "disagree")
    assert parity(*line.split()[1:]).exit_code == 0
    ((package, check),) = searched
    assert (package, check.implementation, check.case.family) == ("liger-kernel", "trl.GRPOTrainer", "policy")
