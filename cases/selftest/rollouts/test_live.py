"""A real vLLM inside TRL's GRPOTrainer, a process a run: where vLLM is installed (make rollouts-live)."""

import subprocess
import sys

import pytest

from parity.rollouts.vllm_engine import distribution

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(distribution() is None, reason="vLLM is not installed: make rollouts-live"),
    pytest.mark.timeout(1500),
]


def lines(*words):
    done = subprocess.run([sys.executable, "-m", "parity.rollouts.live_run", *words], capture_output=True, text=True)
    print("\n" + done.stdout)
    assert done.returncode in (0, 1), done.stderr[-3000:]
    return done.returncode, [line for line in done.stdout.splitlines() if line.startswith("step ")]


def test_colocate_agrees_at_every_step():
    code, steps = lines("colocate")
    assert code == 0 and len(steps) == 3 and all(": agrees" in step for step in steps)


def test_a_sync_switched_off_is_caught_at_step_two():
    code, (first, second, third) = lines("colocate-no-sync")
    assert code == 1 and ": agrees" in first and ": DISAGREES" in second and ": DISAGREES" in third


def test_server_mode_over_loopback_agrees():
    code, steps = lines("server")
    assert code == 0 and len(steps) == 1 and ": agrees" in steps[0]


def test_a_softcap_that_the_engine_lost():
    assert lines("engine", "final_logit_softcapping=null")[0] == 1
