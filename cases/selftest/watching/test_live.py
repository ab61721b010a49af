"""A watched run with a real colocated vLLM, where it is installed (make rollouts-live)."""

import json
import subprocess
import sys

import pytest

from parity.rollouts.vllm_engine import distribution

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(distribution() is None, reason="vLLM is not installed: make rollouts-live"),
    pytest.mark.timeout(1500),
]
WARM = "temperature 1 (raw log-probs: none is applied) where the trainer's is 0.7"


@pytest.mark.parametrize(
    "run, found",
    [("clean", []), ("stale", [["sampler", "weights 1 update old"]]), ("warm", [["sampler", WARM]] * 3)],
)
def test_a_colocated_run_is_silent_until_it_is_wrong(tmp_path, run, found):
    command = [sys.executable, "-m", "cases.selftest.watching.live", run, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("FOUND "))
    said = json.loads(line.removeprefix("FOUND "))
    assert said["looks"] == 3 and said["found"][: len(found) or None] == found
