"""Controls on drawn cases of each family on the device: none is called wrong."""

import pytest
import torch

from cases.selftest.controls.correct import CONTROLS
from cases.selftest.controls.soak import drawn, soak

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CASES = 60


@pytest.mark.parametrize("name", sorted(CONTROLS))
def test_no_control_is_called_wrong(name):
    found = soak(drawn(name, CASES, 0), device="cuda")
    assert found.alarms == []
    assert found.total > 0.7 * CASES * len(CONTROLS[name]), found.silent.most_common(10)
