"""What tests of several folders share."""

import subprocess
from types import SimpleNamespace

import pytest

from fixtures import warm
from parity.running import child


@pytest.fixture(scope="module")
def warm_workers():
    """Workers, and the children in which a user's file is imported, begin behind their imports: `fixtures.warm`."""
    names = SimpleNamespace(Popen=warm.popen, PIPE=subprocess.PIPE, TimeoutExpired=subprocess.TimeoutExpired)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(child, "subprocess", names)
        yield
