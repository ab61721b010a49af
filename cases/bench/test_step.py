"""A whole GRPO step without generation, one round a test, in alternating order; see test_losses.py."""

import functools
import os
import time

import pytest
import torch

from cases.bench import measure, step
from parity.errors import Unsupported

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = "fp32" if DEVICE == "cpu" else "bf16"
ROUNDS = int(os.environ.get("PARITY_BENCH_ROUNDS", "5"))
TIMER = time.perf_counter if DEVICE == "cuda" else time.process_time
SMALL = step.Shape(2, 4, 6, 128, 1, 512)


def pytest_generate_tests(metafunc):
    timing = metafunc.config.getoption("benchmark_only", False)
    names = list(step.PARTIES)
    schedule = [
        (shape, turn, name)
        for shape in (step.SHAPES[DEVICE] if timing else (SMALL,))
        for turn in range(ROUNDS if timing else 1)
        for name in (names if turn % 2 == 0 else names[::-1])
        if timing or "compile" not in name
    ]
    metafunc.parametrize(("shape", "turn", "name"), schedule, ids=lambda value: str(value))


@functools.lru_cache(maxsize=1)
def shared(shape):
    """What each party needed at this shape: its step, its peaks, or why it has none."""
    return {}


def first(known, name, shape):
    """Builds a party and runs it twice, unless that was done: once to warm up, once for the peaks of its phases."""
    step.TimedStep.alone({other: built for other, (built, _, _) in known.items()}, name, DEVICE)
    if name not in known:
        try:
            run = step.TimedStep(name, shape, DTYPE, DEVICE)
            run()
            with measure.peak(DEVICE) as peak:
                run()
            known[name] = run, peak, None
        except Unsupported as error:
            known[name] = None, measure.Peak(), str(error)
        except Exception as error:
            if not measure.out_of_memory(error):
                raise
            known[name] = None, measure.Peak(), "out of memory"
    return known[name]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.benchmark(timer=TIMER, min_rounds=1, warmup=False)
def test_step(benchmark, shape, turn, name):
    run, peak, why = first(shared(shape), name, shape)
    benchmark.group = f"step {shape}"
    benchmark.name = measure.label(name, peak.bytes, {})
    benchmark.extra_info.update(
        table="step", size=str(shape), dtype=DTYPE, turn=turn, name=name, why=why, timer=TIMER.__name__, device=DEVICE
    )
    if run is None:
        pytest.skip(why)
    seconds = benchmark.pedantic(run, rounds=1)
    benchmark.extra_info.update(peak=peak.bytes, peaks=peak.phases, seconds=seconds)
