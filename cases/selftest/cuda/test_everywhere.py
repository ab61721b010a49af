"""`--device cuda` reaches the implementations in every command that has it: seen on the pretended device."""

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from fixtures.pretended_cuda import pretended
from parity.cli.commands import main as cli
from parity.decoding import save_json
from parity.nightly import upgrade
from parity.nightly.steps import CommandOutcome
from parity.registry import family
from parity.versions import bisect as searching
from parity.versions import look
from parity.versions.environment import Environment

CASE = family("logprobs").case(3, "fp32", {"V": 5, "T": 2})


class Asked:
    """Stands for an environment: keeps on which device a probe is to run, and runs it here if it is told to."""

    name, partners, versions, imports, checkouts = "stands", "stands", {}, {}, {}

    def __init__(self, runs=False):
        self.runs, self.devices = runs, []

    def run(self, command, *, settings, **_):
        asked, seen = command[-2:]
        device = json.loads(Path(asked).read_text())["device"]
        self.devices.append(device)
        assert ("TRITON_INTERPRET" in settings) == (settings.get("CUDA_VISIBLE_DEVICES") == "") == (device == "cpu")
        if self.runs:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(look, "prepare", lambda device: None)
                look.main(asked, seen)
        else:
            save_json(Path(seen), look.Look([], {}))
        return subprocess.CompletedProcess(command, 0, "", "")


def test_an_environment_runs_its_cases_on_the_device():
    with pretended():
        asked = Asked(runs=True), [CASE], ["trl.selective_log_softmax"]
        found = {device: look.look(*asked, device=device).rows for device in ("cpu", "cuda")}
    for device, rows in found.items():
        assert rows and {r.device for r in rows} == {device}


@pytest.fixture
def asked(monkeypatch):
    """Every environment, and `torch` that sees a device."""
    one = Asked()
    monkeypatch.setattr(Environment, "of", lambda *args, **kwargs: one)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    return one


def parity(*words):
    done = CliRunner().invoke(cli, [*words, "--device", "cuda"])
    assert done.exit_code != 2 and isinstance(done.exception, SystemExit | None), (done.output, done.exception)
    return done


def test_history_and_compare(asked):
    parity("history", "--record", "delta")
    parity("compare", "trl==1.14.0", "trl==1.15.0", "--implementation", "trl.selective_log_softmax")
    assert len(asked.devices) >= 4 and set(asked.devices) == {"cuda"}


def test_upgrade_check(asked, monkeypatch, tmp_path):
    config, ran = tmp_path / "grpo.json", []
    config.write_text('{"beta": 0.04}')
    monkeypatch.setattr(
        upgrade.steps, "run", lambda name, words, *_: ran.append(words) or CommandOutcome(name, "", 0, 0.0, "")
    )
    parity("upgrade-check", "trl==1.15.0", "--config", str(config), "--reports", str(tmp_path))
    assert len(asked.devices) >= 4, "own settings and compare, of two releases each"
    assert set(asked.devices) == {"cuda"}
    assert len(ran) == 1 and all("--device cuda" in " ".join(words) for words in ran)


def test_bisect(asked, monkeypatch):
    seen = {}

    def search(package, *, check, **how):
        seen.update(how, answer=check(asked))
        return SimpleNamespace(text="", found=SimpleNamespace(outcome="unjudged"))

    monkeypatch.setattr(searching, "search", search)
    parity("bisect", "trl", "--good", "1.14.0", "--bad", "1.15.0", "--case", "delta")
    assert asked.devices == ["cuda"] and "--device cuda" in seen["reproduce"] and "on cuda" in seen["about"]


def test_without_a_device_it_is_one_line():
    done = CliRunner().invoke(cli, ["history", "--device", "cuda"])
    assert done.exit_code == 2 and "torch sees no CUDA device here" in done.output
