"""What one `assert_parity` costs: RMSNorm forward and backward, one thread, once warm."""

import pytest
import torch

from parity.testing import assert_parity

SIZES = ((64, 1024), (1024, 4096))


def rms_norm(x, weight, eps=1e-6):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def kernel(x, weight):
    return torch.nn.functional.rms_norm(x.float(), weight.shape, weight.float(), 1e-6).to(x.dtype)


def pytest_generate_tests(metafunc):
    timing = metafunc.config.getoption("benchmark_only", False)
    metafunc.parametrize("size", SIZES if timing else SIZES[:1], ids=str)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rms_norm(benchmark, request, dtype, size):
    inputs = {"x": torch.randn(size).to(dtype), "weight": torch.randn(size[1]).to(dtype)}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rounds = 1 if not request.config.getoption("benchmark_only", False) else 20 if size == SIZES[0] else 2
        benchmark.pedantic(assert_parity, (kernel, rms_norm, inputs), rounds=rounds, warmup_rounds=1)
    finally:
        torch.set_num_threads(threads)
