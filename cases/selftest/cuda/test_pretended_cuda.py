"""The pretended device refuses, moves and casts as CUDA does; a test that passes on it has met a device."""

import pytest
import torch

from fixtures.pretended_cuda import pretended
from parity.case.layouts import elsewhere


@pytest.fixture(autouse=True)
def device():
    with pretended():
        yield


def test_tensors_of_two_devices_do_not_mix():
    x = torch.ones(3, device="cuda")
    for mixed in (
        lambda: x + torch.ones(3),
        lambda: torch.where(x > 0, x, torch.ones(3)),
        lambda: torch.ones(3)[x > 0],
    ):
        with pytest.raises(RuntimeError, match="device|indices"):
            mixed()
    with pytest.raises(TypeError, match="numpy"):
        x.numpy()
    assert torch.equal((x * torch.tensor(2.0)).cpu(), torch.full((3,), 2.0))  # a number may stay on the CPU
    assert x[torch.tensor([0, 2])].device == torch.device("cuda", 0)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(24.0).view(2, 3, 4)[..., :3],
        torch.arange(12.0).view(3, 4).t(),
        torch.ones(()).expand(2, 3),
        torch.arange(6.0).view(1, 6)[:, ::2],
        torch.zeros(0, 3),
    ],
    ids=["gaps", "transposed", "stride 0", "every other", "empty"],
)
def test_strides_survive_the_move(tensor):
    there = elsewhere(tensor, device="cuda")
    assert there.device.type == "cuda" and torch.equal(there.cpu(), tensor)
    assert there.stride() == tensor.stride() or not tensor.numel()
    meta = elsewhere(tensor, device="meta")
    assert meta.stride() == tensor.stride() or not tensor.numel()
