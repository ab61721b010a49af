"""The fixes in the releases that they repair, each in an environment of its own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from parity.versions.client import EnvironmentUnusable
from parity.versions.environment import Environment

FIXTURES = Path(__file__).parents[3] / "fixtures"
pytestmark = pytest.mark.timeout(1200)  # making an environment takes minutes, on a busy machine many


def in_environment(spec, script, *arguments):
    """What a script of fixtures/ prints as JSON in an environment of an older TRL."""
    try:
        made = Environment.of([spec])
    except EnvironmentUnusable as error:
        pytest.skip(f"environment cannot be made here: {error}")
    done = made.run(["python", str(FIXTURES / script), *arguments], capture=True, cpu_limit=600)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_the_liger_path_of_an_older_trainer_computes_the_plain_loss():
    """trl 0.28.0: its Liger path drops softcap and the generation batch's token count; with ours it trains as plain."""
    found = in_environment("trl==0.28.0", "training.py")
    assert "use_fused_policy_loss: GRPOTrainer.liger_grpo_loss" in found["said"]
    assert found["undone"]
    assert len({entry["grad_norm"] for entry in found["plain"]}) == 2
    for plain, liger, fixed in zip(found["plain"], found["liger"], found["fixed"], strict=True):
        for name in ("loss", "grad_norm", "entropy", "clip_ratio/region_mean"):
            assert fixed[name] == pytest.approx(plain[name], rel=1e-4, abs=1e-6), name
        assert abs(liger["grad_norm"] / plain["grad_norm"] - 1) > 0.05


RELEASES = {
    "0.22.2": {"dppo", "gfpo", "replay"},  # no experimental trainers yet
    "1.0.0": set(),
    None: {"dppo", "gfpo", "replay"},  # the installed release: gone again
}


@pytest.mark.parametrize("release", RELEASES)
def test_generation_keeps_checkpointing_in_every_trainer(release):
    """Imported before or after the patch, holding a switch by value; as released again once it is undone."""
    if release is None:
        command = [sys.executable, str(FIXTURES / "checkpointing.py")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr[-2000:]
        found = json.loads(done.stdout.splitlines()[-1])
    else:
        found = in_environment(f"trl=={release}", "checkpointing.py")
    assert not any(found["released"].values())
    assert all(found["kept"].values())
    assert not any(found["undone"].values())
    assert found["again"] == "already applied"
    assert set(found["missing"]) <= RELEASES[release]
    names = [name for modules in found["patched"].values() for name in modules]
    assert found["rebound"] >= 4
    assert "unwrap_model_for_generation" in names
    assert ("disable_gradient_checkpointing" in names) == (release != "0.22.2")
    assert all(replaced for modules in found["patched"].values() for replaced in modules.values())
    assert not any(replaced for modules in found["left"].values() for replaced in modules.values())
