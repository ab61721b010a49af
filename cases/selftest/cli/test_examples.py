"""The stand-alone examples run as they are."""

import subprocess
import sys


def test_cce_identity():
    command = [sys.executable, "fixtures/examples/cce_identity.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.strip().splitlines()
    assert [line.split(":")[0] for line in lines] == ["temperature 0.001", "temperature 0.7", "temperature 1.0"]
    assert all("torch.allclose True" in line and "torch.dist" in line for line in lines)
