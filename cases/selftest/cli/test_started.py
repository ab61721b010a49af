"""The first ten minutes: `parity demo` without TRL and Liger, and what `parity init` writes into a repository."""

import importlib.metadata
import os
import re
import shlex
import subprocess
import sys
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from cases.selftest.nightly.test_action import ROOT
from fixtures import warm
from parity.cli.commands import main
from parity.cli.init import init
from parity.errors import UsageError
from parity.results.report.rows import read

ABSENT = ("trl", "transformers", "liger_kernel", "cut_cross_entropy", "triton")
HIDING = f"""
import importlib.metadata
from importlib.machinery import PathFinder
found, named = PathFinder.find_spec, importlib.metadata.Distribution.from_name
def of_name(name):
    if name.replace("-", "_") in {ABSENT}:
        raise importlib.metadata.PackageNotFoundError(name)
    return named(name)
importlib.metadata.Distribution.from_name = staticmethod(of_name)
PathFinder.find_spec = staticmethod(
    lambda name, *rest: None if name.partition(".")[0] in {ABSENT} else found(name, *rest)
)
"""


@pytest.fixture
def repository(tmp_path, monkeypatch):
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def ran(folder, *words, env=None):
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=600, cwd=folder, env=env)


def test_the_demo_finds_the_dropped_ratio_without_trl_and_its_replay_line_works(tmp_path):
    (tmp_path / "without").mkdir()
    (tmp_path / "without" / "sitecustomize.py").write_text(HIDING)
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path / "without"), *filter(None, sys.path)])}
    done = ran(tmp_path, "-m", "parity", "demo", env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^right +agrees in all of (9|\d\d) cases$", done.stdout, re.MULTILINE)
    assert re.search(r"^ratio_dropped +disagrees in (9|\d\d) of \1 cases$", done.stdout, re.MULTILINE)
    page = tmp_path / "reports/demo/index.html"
    assert page.stat().st_size > 10_000 and "shown as drawn" not in page.read_text()
    rows = read(tmp_path / "reports/demo/results.ndjson")[1]
    assert max(row.settings["B"] * row.settings["T"] for row in rows) <= 60, "a finding to be read"
    line = re.search(r"^replay +parity (replay .*)$", done.stdout, re.MULTILINE)[1]
    again = ran(tmp_path, "-m", "parity", *shlex.split(line), env=env)
    assert again.returncode == 1 and "class    logic" in again.stdout, again.stdout + again.stderr


def test_init_writes_a_test_that_passes_and_leaves_what_is_there(repository):
    (repository / "test").mkdir()
    first = CliRunner().invoke(main, ["init"])
    assert first.exit_code == 0 and "wrote test/test_parity.py" in first.output
    assert "next: python -m pytest test/test_parity.py" in first.output
    written = (repository / "test/test_parity.py").read_text()
    wrong = written.replace("weight, 1e-6)", "weight.roll(1), 1e-6)")
    (repository / "test/test_wrong.py").write_text(wrong)
    assert "test/test_parity.py is there already" in CliRunner().invoke(main, ["init"]).output
    assert (repository / "test/test_parity.py").read_text() == written
    done = warm.run("pytest", "-q", "test", cwd=repository)
    failed = re.findall(r"^FAILED test/(test_\w+)", done.stdout, re.MULTILINE)
    assert failed == ["test_wrong"] * 6 and "6 failed, 6 passed" in done.stdout, done.stdout


@pytest.mark.usefixtures("warm_workers")
def test_init_with_a_loss_writes_a_gate_that_a_runner_understands(repository):
    (repository / "mine.py").write_text((ROOT / "fixtures" / "kernels.py").read_text())
    (repository / "requirements.txt").write_text("torch\n")
    done = CliRunner().invoke(main, ["init", "mine.py:right"])
    workflow = repository / ".github/workflows/parity.yml"
    line = re.search("- run: parity (run --implementation mine.py:right .*)", workflow.read_text())[1]
    assert done.exit_code == 0 and f"parity {line}\n" in done.output, "as the workflow runs it"
    quick = ["--profile", "quick", "--dtype", "fp32", "--workers", "1"]
    run = CliRunner().invoke(main, [*shlex.split(line), *quick])
    assert run.exit_code == 0, run.output
    assert re.search(
        r"pip install pytest 'llm-parity\[cli\].*' -r requirements.txt$", workflow.read_text(), re.MULTILINE
    )
    done = ran(repository, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows", str(workflow))
    assert done.returncode == 0, done.stdout


HERE = '{"url": "file://HERE", "dir_info": {}}'


@pytest.mark.parametrize(
    ("source", "origin", "address"),
    [
        ('{"url": "https://x.org/p.git", "vcs_info": {"commit_id": "abc"}}', None, "https://x.org/p.git@abc"),
        (HERE, "https://x.org/p.git", "https://x.org/p.git"),
        (HERE, "git@x.org:a/p.git", "https://x.org/a/p.git"),
        (HERE, "https://me:secret@x.org/a/p.git", "https://x.org/a/p.git"),
        (HERE, None, "https://github.com/OWNER/llm-parity"),
        ('{"url": "file:///nowhere/at/all", "dir_info": {}}', None, "https://github.com/OWNER/llm-parity"),
        (None, None, "https://github.com/OWNER/llm-parity"),
    ],
)
def test_the_workflow_installs_from_where_this_was_installed(
    repository, monkeypatch, tmp_path_factory, source, origin, address
):
    """From a repository always: the name is not published."""
    there = tmp_path_factory.mktemp("source")
    subprocess.run(["git", "init", "-q", str(there)], check=True)
    if origin:
        subprocess.run(["git", "-C", str(there), "remote", "add", "origin", origin], check=True)

    def distribution(name):
        if source is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return SimpleNamespace(read_text=lambda name: source.replace("HERE", str(there)))

    monkeypatch.setattr(importlib.metadata, "distribution", distribution)
    monkeypatch.setattr("parity.cli.init.__file__", str(there / "site-packages" / "parity" / "cli" / "init.py"))
    said = CliRunner().invoke(main, ["init"]).output
    workflow = (repository / ".github/workflows/parity.yml").read_text()
    assert f"'llm-parity @ git+{address}'" in workflow and address in said


def test_init_needs_a_repository_and_the_file_of_the_loss(tmp_path, monkeypatch, repository):
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")
    done = warm.run("parity", "init", cwd=tmp_path / "below")
    assert done.returncode == 2 and "no git repository" in done.stderr
    (repository / "mine.py").write_text("def loss(hidden, weight, ids): ...\n")
    for loss, said in {
        "gone.py:loss": "expected FILE.py:NAME of a function",
        "mine.py:los": "mine.py defines no los",
        "../mine.py:right": "expected FILE.py:NAME of a file below",
        "a;b.py:loss": "without signs that a shell reads",
    }.items():
        with pytest.raises(UsageError, match=said):
            init(repository, loss)
    (repository / "tests").write_text("")
    with pytest.raises(UsageError, match="cannot be written"):
        init(repository, None)
