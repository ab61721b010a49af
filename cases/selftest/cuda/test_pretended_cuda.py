"""The pretended device refuses, moves and casts as CUDA does; a test that passes on it has met a device."""

import pytest
import torch

from fixtures.pretended_cuda import OnCuda, pretended
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


def test_gradients_cross_the_move_and_stay_where_their_leaf_is():
    on_cpu, on_cuda = torch.ones(2, requires_grad=True), torch.ones(2, device="cuda", requires_grad=True)
    (on_cpu.cuda() * on_cuda).sum().backward()
    assert on_cpu.grad.device.type == "cpu" and on_cuda.grad.device.type == "cuda"
    assert isinstance(torch.nn.Parameter(on_cuda.detach()), OnCuda)


def test_autocast_follows_cudas_lists():
    x = torch.ones(2, 3, device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        z = torch.nn.functional.linear(x, x)
        assert z.dtype == torch.bfloat16
        assert (
            torch.log_softmax(z, -1).dtype == z.exp().dtype == z.sum(-1).dtype == torch.float32
        )  # the CPU keeps bfloat16
        assert torch.tanh(z).dtype == (z / 2).dtype == torch.bfloat16


def test_random_numbers_are_the_devices_own():
    before = torch.get_rng_state()
    torch.cuda.manual_seed(5)
    first = torch.rand(3, device="cuda")
    torch.cuda.manual_seed(5)
    assert torch.equal(first.cpu(), torch.rand(3, device="cuda").cpu())
    assert torch.equal(before, torch.get_rng_state())
    with pytest.raises(RuntimeError, match="generator"):
        torch.rand(3, device="cuda", generator=torch.Generator())
    with pytest.raises(RuntimeError, match="generator"):
        torch.rand(3, generator=torch.Generator("cuda"))


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
