"""`--with`: the same command inside an environment, with its own exit code; what cannot be made is one line."""

import io
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from parity.cli.commands import main
from parity.versions import inside
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
    variables = {**os.environ, "PYTHONPATH": str(Path(inside.__file__).parents[3])}
    command = [sys.executable, "-m", "parity", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=variables, check=False)


def test_a_case_is_replayed_with_the_other_version_and_its_exit_code_passed_on(made, tmp_path):
    case = str(folder() / "tool-mask.json")
    done = parity("replay", case, "--implementation", "trl.GRPOTrainer.liger", "--with", ASKED, cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert "trl 0.28.0" in done.stderr.splitlines()[0] and inside.described(made) == done.stderr.splitlines()[0]
    assert "disagree" in done.stdout
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("replay ")]
    assert line.endswith(f"--implementation trl.GRPOTrainer.liger --with {ASKED}")


class Unusable:
    @staticmethod
    def of(specs):
        raise EnvironmentUnusable("trl==99.9: no such version")


@pytest.mark.parametrize(("command", "code"), [("run", 3), ("audit", 3), ("replay", 125)])
def test_an_environment_that_cannot_be_made_is_one_line_and_no_judgement(monkeypatch, command, code):
    monkeypatch.setattr(inside, "Environment", Unusable)
    words = [command, *(["one-token"] if command == "replay" else []), "--with", "trl==99.9"]
    monkeypatch.setattr("sys.argv", ["parity", *words])
    done = CliRunner().invoke(main, words)
    assert (done.exit_code, done.output) == (code, "parity: trl==99.9: no such version\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_reaches_the_command_inside_which_ends_in_order(monkeypatch, tmp_path, number):
    """The child writes its rows and ends with its own code; before, the parent died and the child went on unseen."""
    program = (
        "import pathlib, signal, sys, time\n"
        "def ended(*_):\n    pathlib.Path('rows').write_text('whole'); sys.exit(143)\n"
        "signal.signal(signal.SIGTERM, ended); signal.signal(signal.SIGINT, ended)\n"
        "pathlib.Path('ready').touch(); time.sleep(60)\n"
    )

    class Made:
        partners, checkouts, imports = "nothing", {}, {}

        @staticmethod
        def run(argv, settings):
            return subprocess.run([sys.executable, "-c", program], cwd=tmp_path, stdin=subprocess.DEVNULL, check=False)

    def send():
        while not (tmp_path / "ready").exists():
            time.sleep(0.02)
        os.kill(os.getpid(), number)

    monkeypatch.setattr(inside, "Environment", type("E", (), {"of": staticmethod(lambda specs: Made)}))
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    handler = signal.getsignal(number)
    threading.Thread(target=send, daemon=True).start()
    assert inside.run_inside(["trl==1.0"], ["run"]) == 143
    assert (tmp_path / "rows").read_text() == "whole"
    assert signal.getsignal(number) is handler
