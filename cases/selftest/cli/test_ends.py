"""How a command ends: an exit code never says more than is known, whatever a user's file or a reader of the output does."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from cases.selftest.results.runs import HEADER, LOSS
from fixtures import warm
from parity.cli import commands, group
from parity.errors import UsageError
from parity.implementations.implementation import Implementation
from parity.protocol.call import execute
from parity.registry import family
from parity.results.report.rows import Writer
from parity.running.plan import Options, check

LOGPROBS = family("logprobs")

pytestmark = pytest.mark.usefixtures("warm_workers")
KERNEL = """
import os, sys
def own(hidden, weight, ids, temperature=1.0):
    {inside}
    return hidden
{outside}
"""


def kernel(folder: Path, inside="pass", outside="") -> str:
    file = folder / "kernel.py"
    file.write_text(KERNEL.format(inside=inside, outside=outside))
    return f"{file}:own"


def finding(folder: Path, implementation) -> str:
    path = folder / "finding.json"
    case = {"schema": 1, "family": "logprobs", "seed": 1, "dtype": "fp32", "settings": {"bias": "none"}}
    path.write_text(json.dumps({"case": case, "implementation": implementation}))
    return str(path)


def test_code_that_a_finding_names_is_not_loaded(tmp_path):
    spec = kernel(tmp_path, outside=f"open({str(tmp_path / 'loaded')!r}, 'w')")
    done = CliRunner().invoke(commands.main, ["replay", finding(tmp_path, spec)])
    assert done.exit_code == 125, done.output
    assert f"add --implementation {spec}" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "loaded").exists()


@pytest.mark.parametrize(
    ("outside", "says"),
    [
        ("sys.exit(0)", r"importing .*kernel.py calls sys.exit\(0\)"),
        ("os._exit(0)", r"importing .*kernel.py ended the process \(exit code 0\)"),
        ("os.execv('/bin/true', ['true'])", r"importing .*kernel.py ended the process \(exit code 0\)"),
        ("os.kill(os.getpid(), 11)", r"importing .*kernel.py ended the process \(killed by signal 11\)"),
        ("raise GeneratorExit", "importing .*kernel.py fails: GeneratorExit"),
    ],
)
def test_a_file_that_ends_the_process_is_named(tmp_path, outside, says):
    with pytest.raises(UsageError, match=says):
        check(Options(implementations=(kernel(tmp_path, outside=outside),)))


def test_a_loss_that_calls_sys_exit_has_crashed():
    def leaves(x):
        sys.exit(0)

    own = Implementation("own.leaves", "logprobs", "candidate", leaves)
    assert execute(own, LOGPROBS.build(LOGPROBS.case(1, "fp32", {}))).verdict == "crashed"


def test_a_loss_that_ends_its_process_with_0_does_not_agree(tmp_path):
    """`git bisect run` would mark the revision as good."""
    spec = kernel(tmp_path, "os._exit(0)")
    done = warm.run("parity", "replay", finding(tmp_path, spec), "--implementation", spec)
    assert done.returncode == 125, done.stdout + done.stderr


FAULT = RuntimeError("a fault of ours")
FULL = OSError(errno.ENOSPC, "No space left on device")
IMMUTABLE = PermissionError(errno.EPERM, "Operation not permitted", "reports/index.html")
DENIED = PermissionError(errno.EACCES, "Permission denied")
"""Of a process or a socket: no file of the user's."""


@pytest.mark.parametrize(
    ("words", "error", "code", "said"),
    [
        (["list"], FAULT, 70, "an error of the harness"),
        (["replay", "x"], FAULT, 125, "an error of the harness"),
        (["report"], FAULT, 70, "an error of the harness"),
        (["report"], FULL, 2, "parity: a file: No space left on device"),
        (["report"], IMMUTABLE, 2, "parity: reports/index.html: Operation not permitted"),
        (["report"], DENIED, 70, "an error of the harness"),
    ],
)
def test_an_error_of_the_harness_is_no_disagreement_and_a_file_the_users_to_mend(monkeypatch, words, error, code, said):
    """1 would read as a new finding, and in replay as a bad revision."""

    def broken(*args, **kwargs):
        raise error

    monkeypatch.setattr(commands.main.commands[words[0]], "invoke", broken)
    done = CliRunner().invoke(commands.main, words)
    assert done.exit_code == code and said in done.output
    assert done.output.startswith(said if code == 2 else "Traceback")


@pytest.mark.parametrize("words", [["replay", "--no-such-option"], ["replay"], ["replay", "x" * 5000]])
def test_usage_errors_of_replay_are_no_judgement(words):
    assert CliRunner().invoke(commands.main, words).exit_code == 125


def test_a_reader_that_stops_reading_changes_nothing(tmp_path):
    path = tmp_path / "results.ndjson"
    with Writer(path) as write:
        write(HEADER)
        write(LOSS)
    whole = CliRunner().invoke(commands.main, ["report", str(path), "--reports", str(tmp_path / "whole")])
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "parity", "report", str(path), "--reports", str(tmp_path / "cut")]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, timeout=300)
    os.close(write)
    assert (done.returncode, done.stderr) == (whole.exit_code, "") == (0, "")
    assert {p.name for p in (tmp_path / "cut").iterdir()} == {p.name for p in (tmp_path / "whole").iterdir()}


def test_what_a_closed_pipe_cuts_off_has_not_agreed(monkeypatch):
    def judging(*args, **given):
        raise BrokenPipeError

    monkeypatch.setattr(commands.main.commands["findings"], "invoke", judging)
    monkeypatch.setattr(group, "silence", lambda: None)
    assert CliRunner().invoke(commands.main, ["findings"]).exit_code == 141
