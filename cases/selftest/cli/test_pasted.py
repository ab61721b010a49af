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


def test_a_file_is_replayed_by_the_line_that_replay_prints(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    case = loss_family("logprobs").case(1, "fp32", {})
    (tmp_path / "mine.json").write_text(json.dumps(case.to_json()))
    (tmp_path / "off.py").write_text(
        "import torch\n\n\ndef off(hidden, weight, ids):\n    z = torch.log_softmax(hidden @ weight.T, -1)\n"
        "    return 1.01 * z.gather(-1, ids[..., None])[..., 0]\n"
    )
    words = ("replay", "mine.json", "--implementation", "off.py:off")
    (line,) = re.findall("(?m)^replay +(parity .*)$", done(*words).stdout)
    assert "mine.json" in line and done(*shlex.split(line)[1:]).exit_code == 1


SLIP = ("liger-luspo-paddin", "did you mean liger-luspo-padding?")


@pytest.mark.parametrize(("name", "said"), [SLIP, ("nonsense", "")])
def test_an_unknown_case_is_one_short_line(name, said):
    told = done("replay", name).stderr
    assert said in told and len(told) < 220
