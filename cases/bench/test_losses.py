"""Forward and backward of every implementation, and its error, one round a test, implementations in an order that alternates.

`make bench` times every size; an ordinary test run takes one round of the smallest. PARITY_BENCH_ROUNDS, _SIZES (places
in `losses.SIZES`) and _DTYPES make it shorter.
"""

import functools
import os
import time

import pytest
import torch

from cases.bench import losses, measure
from parity.errors import Unsupported
from parity.registry import load

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = os.environ.get("PARITY_BENCH_DTYPES", "fp32 bf16" if DEVICE == "cpu" else "bf16").split()
FAMILIES = {"logprobs": losses.LOGPROBS, "policy": losses.POLICY}
LARGEST = {"cpu": 2**27, "cuda": 2**30}
"""Logits that the float64 reference takes at once; it holds about ten times as many float64 numbers."""
ROUNDS = int(os.environ.get("PARITY_BENCH_ROUNDS", "5"))
# On a shared CPU the time that this process ran is what can be compared; one thread, so nothing waits for another.
TIMER = time.perf_counter if DEVICE == "cuda" else time.process_time


def pytest_generate_tests(metafunc):
    timing = metafunc.config.getoption("benchmark_only", False)
    chosen = [int(i) for i in os.environ.get("PARITY_BENCH_SIZES", "0 1 2").split()]
    sizes = [losses.SIZES[DEVICE][i] for i in chosen] if timing else losses.SIZES["cpu"][:1]
    schedule = [
        (family, size, dtype, turn, name)
        for size in sizes
        for dtype in DTYPES
        for family, names in FAMILIES.items()
        for turn in range(ROUNDS if timing else 1)
        for name in (names if turn % 2 == 0 else names[::-1])
    ]
    if not timing:
        schedule = [entry for entry in schedule if not entry[-1].endswith(("compiled", "torch_compile"))]
    metafunc.parametrize(("family", "size", "dtype", "turn", "name"), schedule, ids=lambda value: str(value))


@functools.lru_cache(maxsize=1)
def shared(family, size, dtype):
    """The inputs of all implementations, the float64 results, and of each its pass, errors, peak, or why it has none."""
    given = losses.inputs(family, size, dtype, DEVICE)
    return given, losses.reference(given, LARGEST[DEVICE]), {}


def first(known, name, inputs, right):
    """Prepares and runs an implementation once, unless that was done: warm-up, compilation, results, peak memory."""
    if name not in known:
        try:
            run = losses.prepared(load()[name], inputs)
            results = run()
            with measure.peak(DEVICE) as peak:
                run()
            known[name] = run, losses.errors(results, right), peak.bytes, None
        except Unsupported as error:
            known[name] = None, {}, None, str(error)
        except Exception as error:
            if not measure.out_of_memory(error):
                raise
            known[name] = None, {}, None, "out of memory"
    return known[name]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.benchmark(timer=TIMER, min_rounds=1, warmup=False)
def test_forward_and_backward(benchmark, family, size, dtype, turn, name):
    inputs, right, known = shared(family, size, dtype)
    run, errors, peak, why = first(known, name, inputs, right)
    benchmark.group = f"{family} {size} {dtype}"
    benchmark.name = measure.label(name, peak, errors)
    benchmark.extra_info.update(table=family, size=str(size), dtype=dtype, turn=turn, name=name, peak=peak)
    benchmark.extra_info.update(errors=errors, why=why, timer=TIMER.__name__, device=DEVICE)
    if run is None:
        pytest.skip(why)
    benchmark.pedantic(run, rounds=1)
    assert set(errors) == {"value", "gradient"}, "nothing was compared"
    something_else = 0.2 if dtype != "fp32" else 1e-4  # TRL's and Liger's GRPO gradients are 0.06 off in bf16
    assert all(error < something_else for error in errors.values()), errors
