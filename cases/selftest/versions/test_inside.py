"""`--with`: the same command inside an environment, with its own exit code; what cannot be made is one line."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from parity.cli.commands import main
from parity.versions import environment
from parity.versions.client import EnvironmentUnusable
from parity.versions.environment import Environment
from parity.versions.history import folder

ASKED = "trl==0.28.0"


@pytest.fixture(scope="module")
def made():
    try:
        return Environment.of([ASKED])
    except EnvironmentUnusable as error:
        pytest.skip(f"environments cannot be made here: {error}")


def parity(*arguments, cwd):
    variables = {**os.environ, "PYTHONPATH": str(Path(environment.__file__).parents[3])}
    command = [sys.executable, "-m", "parity", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=variables, check=False)


def test_a_case_is_replayed_with_the_other_version_and_its_exit_code_passed_on(made, tmp_path):
    case = str(folder() / "tool-mask.json")
    done = parity("replay", case, "--implementation", "trl.GRPOTrainer.liger", "--with", ASKED, cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert "trl 0.28.0" in done.stderr.splitlines()[0] and made.described == done.stderr.splitlines()[0]
    assert "disagree" in done.stdout
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("replay ")]
    assert line.endswith(f"--implementation trl.GRPOTrainer.liger --with {ASKED}")


class Unusable:
    @staticmethod
    def of(specs):
        raise EnvironmentUnusable("trl==99.9: no such version")


@pytest.mark.parametrize(("command", "code"), [("run", 3), ("replay", 125)])
def test_an_environment_that_cannot_be_made_is_one_line_and_no_judgement(monkeypatch, command, code):
    monkeypatch.setattr(environment, "Environment", Unusable)
    words = [command, *(["one-token"] if command == "replay" else []), "--with", "trl==99.9"]
    monkeypatch.setattr("sys.argv", ["parity", *words])
    done = CliRunner().invoke(main, words)
    assert (done.exit_code, done.output) == (code, "parity: trl==99.9: no such version\n")


PYTHON = """#!{python}
import fcntl, os, sys
with open({claim!r}, "a") as file:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        print("in use", os.getpid(), *sys.argv[1:], os.environ["EXTRA"])
sys.exit(7)
"""


def test_the_process_becomes_the_command_and_the_environment_is_in_use(tmp_path):
    """A signal, a kill and an exit code are the command's own; nobody removes what it runs in."""
    python = tmp_path / "made" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(PYTHON.format(python=sys.executable, claim=str(tmp_path / ".made.claim")))
    python.chmod(0o755)
    program = (
        "import pathlib, sys; from parity.versions.environment import Environment\n"
        "made = Environment(pathlib.Path(sys.argv[1]), {}, {})\n"
        "made.become(['python', 'a', 'b c'], {'EXTRA': 'x'})"
    )
    variables = {**os.environ, "PYTHONPATH": str(Path(environment.__file__).parents[2])}
    command = [sys.executable, "-c", program, str(tmp_path / "made")]
    started = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=variables)
    out, _ = started.communicate(timeout=120)
    assert (started.returncode, out) == (7, f"in use {started.pid} a b c x\n")
    python.unlink()
    assert subprocess.run(command, capture_output=True, text=True, env=variables).stderr.endswith("ask for it again\n")
