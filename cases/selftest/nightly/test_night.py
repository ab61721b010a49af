"""The night: proof of life, exit codes of its parts, what it holds the next night to, and its steps."""

import json
import subprocess
import sys
import time

import pytest
from click.testing import CliRunner

from parity.cli.commands import main
from parity.cli.nightly import duration
from parity.errors import UsageError
from parity.nightly import night, proof, steps


def test_a_planted_mistake_is_caught_in_every_family():
    found = proof.proof("cpu", 3)
    assert [p.family for p in found] == list(proof.FAMILIES)
    assert all(p.holds for p in found), [str(p) for p in found]


def test_a_judge_that_sees_nothing_ends_the_night(tmp_path, monkeypatch):
    blind = proof.Proof("policy", "cpu", "kl-sign", caught=False, cases=120, innocent=True)
    monkeypatch.setattr(night, "proof", lambda device, seed: [blind])
    monkeypatch.setattr(night.running, "execute", lambda *_: pytest.fail("the run began all the same"))
    told = []
    code, change = night.run(night.Night(reports=tmp_path), told.append, None)
    assert (code, change) == (3, None) and any("NOT caught" in line for line in told)
    assert json.loads((tmp_path / "night.json").read_text())["exit_code"] == 3


@pytest.mark.parametrize(
    "codes, expected", [((0, 0), 0), ((0, 1), 1), ((4, 1), 1), ((4, 0), 4), ((1, 3), 3), ((0, 70), 70), ((1, -9), -9)]
)
def test_the_gravest_part_decides(codes, expected):
    assert night.worst(codes) == expected


@pytest.mark.parametrize("text, seconds", [("6h", 21600), ("90m", 5400), ("1h30m", 5400), ("45s", 45)])
def test_times(text, seconds):
    assert duration(text).total_seconds() == seconds


@pytest.mark.parametrize("text", ["", "h", "6", "six hours", "-1h", "1h2h"])
def test_a_time_that_cannot_be_read(text):
    with pytest.raises(UsageError, match="cannot be read"):
        duration(text)


def test_a_step_ends_with_its_time(tmp_path, monkeypatch):
    monkeypatch.setattr(
        steps, "COMMAND", (sys.executable, "-c", "import sys, time; print('here', flush=True); time.sleep(60)")
    )
    begun = time.monotonic()
    step = steps.run("slow", ["x"], tmp_path / "slow.log", 2.0)
    assert step.exit_code is None and step.tail == "here" and time.monotonic() - begun < 40


def test_a_step_hands_on_its_exit_code(tmp_path):
    step = steps.run("list", ["list", "--family", "nothing"], tmp_path / "list.log", 120.0)
    assert (step.exit_code, step.verdict) == (2, "wrong usage") and "unknown" in step.tail


def test_a_whole_short_night_and_the_next_one(tmp_path):
    words = ["nightly", "--profile", "quick", "--family", "logprobs", "--implementation", "fixes.selective_log_probs"]
    words += [
        "--skip",
        "history",
        "--skip",
        "mutants",
        "--skip",
        "unsloth",
        "--max-time",
        "4m",
        "--seed",
        "5",
        "--reports",
        str(tmp_path),
    ]
    first = CliRunner().invoke(main, words)
    assert first.exit_code == 0, first.output
    assert json.loads((tmp_path / "heartbeat.json").read_text())["state"] == "done"
    assert (tmp_path / "index.html").exists() and "green" in (tmp_path / "issue.md").read_text()
    nights = ["notify", "--profile", "quick", "--reports", str(tmp_path)]
    assert "no run was ever kept" in CliRunner().invoke(main, nights[:1] + nights[3:]).output
    told = CliRunner().invoke(main, [*nights, "--out", str(tmp_path / "text.md")])
    assert told.exit_code == 0 and told.output.startswith("parity: green")
    seen = CliRunner().invoke(main, ["history-of", "fixes.selective_log_probs", "--reports", str(tmp_path)])
    assert seen.exit_code == 0 and "quick" in seen.output
    late = CliRunner().invoke(main, [*nights, "--stale", "0s"])
    assert late.exit_code == 3 and "no night" in late.output


def test_a_run_that_is_out_of_time_says_where_it_stopped(tmp_path):
    words = ["run", "--family", "logprobs", "--implementation", "fixes.selective_log_probs", "--max-time", "1s"]
    done = subprocess.run(
        [sys.executable, "-m", "parity", *words, "--reports", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert "the time was over: logprobs after" in done.stdout, done.stdout + done.stderr
    header = json.loads((tmp_path / "results.ndjson").read_text().partition("\n")[0])
    assert header["header"]["profile"] == "pr"
