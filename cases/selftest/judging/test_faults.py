"""Which errors of CUDA end its context, and which do not."""

import pytest
import torch

from parity.judging import faults


@pytest.mark.parametrize(
    ("error", "ends"),
    [
        (torch.AcceleratorError("CUDA error: device-side assert triggered\nCUDA kernel errors might be"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), True),
        (RuntimeError("Triton Error [CUDA]: misaligned address"), True),
        (RuntimeError("CUDA error: invalid configuration argument"), False),
        (RuntimeError("CUDA error: out of memory"), False),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 32.00 TiB"), False),
        (ValueError("misaligned address"), False),
    ],
)
def test_what_ends_a_context(error, ends):
    assert faults.sticky(error) is ends
