"""Peak memory of a block, what counts as running out of it, and numbers rounded for people."""

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch


@dataclass
class Peak:
    """Bytes that a block allocated at its highest above what was allocated when it began."""

    bytes: int = 0


@contextlib.contextmanager
def peak(device: str) -> Iterator[Peak]:
    """Measures the peak of torch's allocator inside the block, exactly and without sampling.

    On the CPU from the profiler's allocation events (what a BLAS allocates for itself is not in it), on CUDA from the
    caching allocator. The block is slower than without: never time it.
    """
    found = Peak()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        yield found
        torch.cuda.synchronize()
        found.bytes = torch.cuda.max_memory_allocated() - before
        return
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        yield found
    events = profiler.profiler.kineto_results.events()
    live = 0
    for _, size in sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"):
        live += size
        found.bytes = max(found.bytes, live)


def out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory ran out, on CUDA or in torch's CPU allocator."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator" in str(error)


def label(name: str, peak: int | None, errors: Mapping[str, float]) -> str:
    """A benchmark's name in the tables of pytest-benchmark: with peak memory and errors."""
    told = [f"{kind} {error:.1e}" for kind, error in errors.items()]
    return ", ".join([f"{name}: {(peak or 0) / 1e6:,.0f} MB", *told])


def short(value: float) -> str:
    """Two significant digits: 0.0054, 220, 1,800, and with an exponent only below 0.001 or from 10,000 on: 5.4e-6, 2e33."""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "∞" if value > 0 else "-∞"
    rounded = float(f"{value:.2g}")
    if rounded == 0 or 1e-3 <= abs(rounded) < 1e4:
        return f"{rounded:,.10g}"
    digits, exponent = f"{rounded:.1e}".split("e")
    return f"{digits.removesuffix('.0')}e{int(exponent)}"
