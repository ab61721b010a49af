"""Peak memory of a block, and what counts as running out of it."""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch


@dataclass
class Peak:
    """Bytes that a block allocated at its highest above what was allocated when it began, overall and by phase."""

    bytes: int = 0
    phases: dict[str, int] = field(default_factory=dict)


@contextlib.contextmanager
def peak(device: str) -> Iterator[Peak]:
    """Measures the peak of torch's allocator inside the block, exactly and without sampling.

    On the CPU from the profiler's allocation events (what a BLAS allocates for itself is not in it), with the peak of
    every `torch.profiler.record_function` range whose name begins with "phase:"; on CUDA from the caching allocator.
    The block is slower than without: never time it.
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
    ranges = [
        (e.name().removeprefix(_PHASE), e.start_ns(), e.start_ns() + e.duration_ns())
        for e in events
        if e.name().startswith(_PHASE)
    ]
    live = 0
    for at, size in sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"):
        live += size
        found.bytes = max(found.bytes, live)
        for name, start, end in ranges:
            if start <= at <= end:
                found.phases[name] = max(found.phases.get(name, 0), live)


_PHASE = "phase:"


def phase(name: str) -> contextlib.AbstractContextManager[object]:
    """A range whose peak `peak` reports under this name."""
    return torch.profiler.record_function(_PHASE + name)


def out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory ran out, on CUDA or in torch's CPU allocator."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator" in str(error)


def label(name: str, peak: int | None, errors: Mapping[str, float]) -> str:
    """A benchmark's name in the tables of pytest-benchmark: with peak memory and errors."""
    return ", ".join(
        [f"{name}: {(peak or 0) / 1e6:,.0f} MB", *(f"{kind} {error:.1e}" for kind, error in errors.items())]
    )
