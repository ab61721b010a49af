"""Every line that a run prints to be pasted works, where its results and reports are elsewhere too."""

import html
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

FIXTURE = Path(__file__).parents[3] / "fixtures" / "rms_norm.py"


def done(*words, **options):
    command = [sys.executable, "-m", "parity.cli.commands", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, **options)


@pytest.mark.parametrize(("minimise", "file"), [("--minimise", "wrong.py"), ("--no-minimise", FIXTURE)])
def test_each_line_ends_as_it_should(tmp_path, minimise, file):
    """The function may be in another file than its family."""
    (tmp_path / "wrong.py").write_text(
        "def wrong(x, weight, eps):\n    return x / (x.norm(dim=-1, keepdim=True) + eps)\n"
    )
    (tmp_path / "none.toml").write_text("alone = true")  # each defect of the installed libraries has a line of its own
    words = ["run", "--profile", "quick", "--dtype", "fp32", "--workers", "1", minimise]
    words += ["--family", f"{FIXTURE}:FAMILY", "--implementation", f"{file}:wrong"]
    words += ["--results", tmp_path / "mine.ndjson", "--reports", tmp_path / "out", "--ledger", tmp_path / "none.toml"]
    run = done(*words, cwd=tmp_path)
    assert run.returncode == 1, run.stderr
    assert ("run again (--no-minimise ends sooner)" in run.stderr) == (minimise == "--minimise"), run.stderr
    full = done("report", tmp_path / "mine.ndjson", "--reports", tmp_path / "out", "-v", cwd=tmp_path)
    page = re.findall("<code>(parity .*?)</code>", (tmp_path / "out" / "index.html").read_text())
    printed = re.findall("(?m)(?:^|  )(parity (?!0).*)$", run.stdout + full.stdout) + list(map(html.unescape, page))
    assert len(set(printed)) >= 2
    for line in dict.fromkeys(one for one in printed if not one.endswith(" --issue")):
        said = done(*shlex.split(line)[1:], cwd=tmp_path)
        assert said.returncode == (1 if "replay" in line else 0), (line, said.stdout, said.stderr)
        assert "replay" not in line or f"replay   {line.partition(' --test ')[0]}\n" in said.stdout
    kept = subprocess.run([sys.executable, "-m", "pytest", "-q", "tests"], capture_output=True, text=True, cwd=tmp_path)
    assert "1 failed" in kept.stdout, kept.stdout


def test_a_file_is_replayed_by_the_line_that_replay_prints(tmp_path):
    from parity.registry import loss_family

    case = loss_family("logprobs").case(1, "fp32", {})
    (tmp_path / "mine.json").write_text(json.dumps(case.to_json()))
    (tmp_path / "off.py").write_text(
        "import torch\n\n\ndef off(hidden, weight, ids):\n    z = torch.log_softmax(hidden @ weight.T, -1)\n"
        "    return 1.01 * z.gather(-1, ids[..., None])[..., 0]\n"
    )
    words = ("replay", "mine.json", "--implementation", "off.py:off")
    (line,) = re.findall("(?m)^replay +(parity .*)$", done(*words, cwd=tmp_path).stdout)
    assert "mine.json" in line and done(*shlex.split(line)[1:], cwd=tmp_path).returncode == 1


SLIP = ("liger-luspo-paddin", "did you mean liger-luspo-padding?")


@pytest.mark.parametrize(("name", "said"), [SLIP, ("nonsense", "")])
def test_an_unknown_case_is_one_short_line(name, said):
    told = done("replay", name).stderr
    assert said in told and len(told) < 220
