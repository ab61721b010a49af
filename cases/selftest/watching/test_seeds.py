"""Each cause is named, and nothing else, whatever was generated: the tests of causes under twenty seeds, at night."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cases.selftest.slow import HOURS
from cases.selftest.watching import test_causes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(HOURS)]


@pytest.mark.parametrize("seed", range(1, 21))
def test_causes_are_named_under_another_seed(seed):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(Path(test_causes.__file__))]
    done = subprocess.run(command, env=os.environ | {"SELFTEST_SEED": str(seed)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
