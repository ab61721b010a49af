"""The first minutes on a GPU box: steps are commands that exist, none stops the others; without a GPU the exit code is 3."""

import os
import re
import subprocess
from pathlib import Path

from click.testing import CliRunner

from cases.cuda import first as cuda_first
from cases.selftest.results import runs
from parity.cli.commands import main as cli
from parity.nightly import steps
from parity.results.memory import CommandOutcome
from parity.sampling.find import find

ROOT = Path(__file__).parents[3]


def test_without_a_gpu(capsys, tmp_path):
    assert cuda_first.main(tmp_path / "results") == 3
    assert "no CUDA device here" in capsys.readouterr().err
    assert not (tmp_path / "results").exists()


def test_the_steps_are_commands_that_exist():
    found = cuda_first.steps()
    for words in found.values():
        if words[0] != "pytest":
            assert CliRunner().invoke(cli, [words[0], "--help"]).exit_code == 0
        else:
            paths = [ROOT / word for word in words if word.startswith("cases/")]
            assert paths and all(path.exists() for path in paths)
    for case in cuda_first.FROZEN:
        assert find(case)
    assert len(found) > 8


def row(implementation, device, headroom):
    return runs.row("a", implementation=implementation, dtype="bf16", device=device, headroom=headroom)


def test_the_page_tells_cuda_from_the_cpu():
    rows = [row("x", "cuda", 0.5), row("x", "cuda", 0.25), row("y", "cpu", 0.9)]
    text = cuda_first.page({"device_name": "H"}, [CommandOutcome("doctor", "parity doctor", None, 600.0, "said")], rows)
    assert "Compared on CUDA: 1 implementation-cases; on the CPU: 1." in text
    assert "| x | norm | 2 | 0.5 | 0.5 | 0.5 |" in text and "| y |" not in text
    assert "doctor: ran past its limit, 600 s" in text


def test_what_is_timed_runs_alone(monkeypatch, tmp_path):
    """Steps that fail, and one beside which none may run."""
    commands = {"doctor": ("list", "--help"), "broken": ("replay", "--nothing"), "bench": ("list", "--help")}
    running, beside = [], {}

    def run(name, *more):
        beside[name] = len(running)
        running.append(name)
        found = steps.run(name, *more)
        running.remove(name)
        return found

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(cuda_first, "described", lambda: {"device_name": "H 1"})
    monkeypatch.setattr(cuda_first, "steps", lambda: commands)
    monkeypatch.setattr(cuda_first, "run", run)
    monkeypatch.setattr(cuda_first, "REPORTS", tmp_path / "reports")
    assert cuda_first.main(tmp_path) == 0
    (page,) = tmp_path.glob("h-1-*.md")
    ends = re.findall(r"### (\w+): exit code (\d+)", page.read_text())
    assert sorted(ends) == [("bench", "0"), ("broken", "125"), ("doctor", "0")]
    assert ends[-1][0] == "bench" and beside["bench"] == 0


def test_a_device_that_answers_no_probe_stops_nothing(monkeypatch):
    def broken(*args):
        raise RuntimeError("CUDA error: busy\nadvice")

    monkeypatch.setattr(cuda_first, "header", broken)
    assert cuda_first.described() == {"device_name": "cuda", "error": "CUDA error: busy advice"}


def test_without_a_network_nothing_is_installed():
    """With what the box has; one command, as the page says it."""
    line = "make cuda-first VENV=0 PYTHON=python3"
    assert line in (ROOT / "docs/cuda.md").read_text()
    env = os.environ | {"MAKEFLAGS": ""}
    done = subprocess.run([*line.split(), "-n"], cwd=ROOT, capture_output=True, text=True, env=env)
    commands = [c.strip() for c in done.stdout.splitlines() if not c.startswith("make[")]
    assert commands[-1] == "python3 -m cases.cuda.first" and done.returncode == 0
    assert not [c for c in commands if "pip" in c or "uv " in c or "constraints" in c or "-m venv" in c], commands
    assert all("--check" in c or c == commands[-1] for c in commands), commands
