"""Twelve replicas on the CPU and on the device, side by side by size: `ON_DEVICE` is to be where the device becomes faster."""

import time

import pytest
import torch

from parity.judge.recipe import Recipe
from parity.judging.oracle import exact, replicas
from parity.registry import loss_family

DEVICES = ("cpu", *(["cuda"] if torch.cuda.is_available() else []))
SIZES = (128, 1_024, 8_192, 32_768, 131_072, 262_144)
"""Vocabularies of eight tokens, up to 2²¹ logits."""


def pytest_generate_tests(metafunc):
    timing = metafunc.config.getoption("benchmark_only", False)
    metafunc.parametrize("size", SIZES if timing and "cuda" in DEVICES else SIZES[:1])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.benchmark(timer=time.perf_counter, min_rounds=1, warmup=False)
def test_replicas(benchmark, size, device):
    family = loss_family("logprobs")
    x = family.build(family.case(1, "fp32", {"B": 1, "T": 8, "V": size, "H": 16}))
    x = x.replace(**{name: t.to(device) for name, t in x.tensors.items() if t is not None})
    exact(family, x)  # the first call loads kernels
    replicas(family, x, Recipe(), range(1), 0)
    benchmark.group = f"replicas, {8 * size:,} logits"
    found = benchmark.pedantic(lambda: replicas(family, x, Recipe(), range(12), 0), rounds=1)
    assert {value.device.type for value in found.values()} == {"cpu"}  # handed out there, and that takes time too
