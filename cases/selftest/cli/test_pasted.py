"""Every line that a run prints to be pasted works, where its results and reports are elsewhere too."""

import html
import json
import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from fixtures import warm
from parity import registry
from parity.cli.commands import main
from parity.implementations import user
from parity.registry import loss_family

pytestmark = pytest.mark.usefixtures("warm_workers")

FIXTURE = Path(__file__).parents[3] / "fixtures" / "rms_norm.py"


def done(*words):
    """As in a process of its own: nothing is known of a user's files."""
    registry._ADDED.clear()
    user._module.cache_clear()
    return CliRunner().invoke(main, [*map(str, words)])


@pytest.mark.parametrize(("minimise", "file"), [("--minimise", "wrong.py"), ("--no-minimise", FIXTURE)])
def test_each_line_ends_as_it_should(tmp_path, monkeypatch, minimise, file):
    """The function may be in another file than its family."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wrong.py").write_text(
        "def wrong(x, weight, eps):\n    return x / (x.norm(dim=-1, keepdim=True) + eps)\n"
    )
    (tmp_path / "none.toml").write_text("alone = true")  # each defect of the installed libraries has a line of its own
    words = ["run", "--profile", "demo", "--dtype", "fp32", "--workers", "1", minimise]
    words += ["--family", f"{FIXTURE}:FAMILY", "--implementation", f"{file}:wrong"]
    words += ["--results", tmp_path / "mine.ndjson", "--reports", tmp_path / "out", "--ledger", tmp_path / "none.toml"]
    run = done(*words)
    assert run.exit_code == 1, run.stderr
    assert ("run again (--no-minimise ends sooner)" in run.stderr) == (minimise == "--minimise"), run.stderr
    full = done("report", tmp_path / "mine.ndjson", "--reports", tmp_path / "out", "-v")
    page = re.findall("<code>(parity .*?)</code>", (tmp_path / "out" / "index.html").read_text())
    printed = re.findall("(?m)(?:^|  )(parity (?!0).*)$", run.stdout + full.stdout) + list(map(html.unescape, page))
    assert len(set(printed)) >= 2
    for line in dict.fromkeys(one for one in printed if not one.endswith(" --issue")):
        said = done(*shlex.split(line)[1:])
        assert said.exit_code == (1 if "replay" in line else 0), (line, said.stdout, said.stderr)
        assert "replay" not in line or f"replay   {line.partition(' --test ')[0]}\n" in said.stdout
    kept = warm.run("pytest", "-q", "tests", cwd=tmp_path)
    assert "1 failed" in kept.stdout, kept.stdout


OFF = """
import torch


def off(hidden, weight, ids):
    z = torch.log_softmax(hidden @ weight.T, -1)
    return 1.01 * z.gather(-1, ids[..., None])[..., 0]
"""
REPLAY = ("replay", "mine.json", "--implementation", "off.py:off")


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A case, and a loss that is wrong on it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "off.py").write_text(OFF)
    (tmp_path / "mine.json").write_text(json.dumps(loss_family("logprobs").case(3, "fp32", {}).to_json()))
    return tmp_path


def test_a_file_is_replayed_by_the_line_that_replay_prints(repository):
    (line,) = re.findall("(?m)^replay +(parity .*)$", done(*REPLAY).stdout)
    assert "mine.json" in line and done(*shlex.split(line)[1:]).exit_code == 1


def test_what_was_asked_for_is_told_before_its_reference(repository):
    said = done(*REPLAY).stdout
    assert said.index("off.py:off") < said.index("trl.selective_log_softmax"), said


def test_a_kept_test_fails_until_the_loss_is_mended_and_is_written_over_nothing(repository):
    assert done("replay", "mine.json", "--test", "tests/test_kept.py").exit_code == 125, "which implementation?"
    said = done(*REPLAY, "--test", "tests/test_kept.py").stdout
    assert "wrote tests/test_kept.py: python -m pytest tests/test_kept.py" in said
    kept = (repository / "tests/test_kept.py").read_text()
    assert done(*REPLAY, "--test", "tests/test_kept.py").exit_code == 125
    assert (repository / "tests/test_kept.py").read_text() == kept
    found = warm.run("pytest", "-q", "test_kept.py", cwd=repository / "tests")
    assert found.returncode == 1 and "1.01 times the definition" in found.stdout, found.stdout
    (repository / "off.py").write_text(OFF.replace("1.01 * ", ""))
    found = warm.run("pytest", "-q", "test_kept.py", cwd=repository / "tests")
    assert found.returncode == 0 and "1 passed" in found.stdout, found.stdout


SLIP = ("liger-luspo-paddin", "did you mean liger-luspo-padding?")


@pytest.mark.parametrize(("name", "said"), [SLIP, ("nonsense", "")])
def test_an_unknown_case_is_one_short_line(name, said):
    told = done("replay", name).stderr
    assert said in told and len(told) < 220
