"""What tests of several folders share."""

import os
import subprocess
from types import SimpleNamespace

import pytest

from fixtures import warm
from parity.process import prepare
from parity.running import child


@pytest.fixture(scope="module")
def warm_workers():
    """Workers, and the children in which a user's file is imported, begin behind their imports: `fixtures.warm`."""
    names = SimpleNamespace(Popen=warm.popen, PIPE=subprocess.PIPE, TimeoutExpired=subprocess.TimeoutExpired)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(child, "subprocess", names)
        yield


@pytest.fixture
def device():
    """Where a slow test runs implementations, as in a worker of a run."""
    name = os.environ.get("SELFTEST_DEVICE", "cpu")
    prepare(name)
    return name
