"""`parity doctor`: what is installed, what can run here, what is missing and how to get it. Downloads nothing."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys

from rich.console import Console

from parity import recording
from parity.implementations.implementation import Implementation
from parity.registry import load
from parity.rollouts import vllm_engine
from parity.running import gpu
from parity.running.provenance import resolve_device, versions


def diagnose(console: Console) -> int:
    """Print the diagnosis; 0 where something can be compared, 3 where nothing can."""
    found = versions()
    console.print("[bold]installed[/bold]")
    console.print("  " + ", ".join(f"{k} {v}" for k, v in found.items()), soft_wrap=True)
    device = resolve_device("auto")
    console.print(f"[bold]device[/bold]\n  {device}: {_device_text(device)}")
    for why in (gpu.unusable(), gpu.no_triton() if device == "cuda" else None):
        if why:
            console.print(f"  {why}", soft_wrap=True, markup=False)
    compiler = shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++") or shutil.which("clang++")
    console.print(
        f"[bold]C++ compiler[/bold]\n  {compiler}"
        if compiler
        else "[bold]C++ compiler[/bold]\n  none: torch.compile paths crash (Debian: apt-get install g++)"
    )
    ready: list[Implementation] = []
    blocked: list[Implementation] = []
    for item in load().values():
        (blocked if item.missing() else ready).append(item)
    console.print(f"[bold]implementations[/bold]\n  {len(ready)} can run here, {len(blocked)} cannot")
    for reason in sorted({str(i.missing()) for i in blocked}):
        names = ", ".join(i.id for i in blocked if i.missing() == reason)
        console.print(f"  {names}: {reason}", soft_wrap=True, markup=False)
    interpreted = [i.id for i in ready if i.interpreted]
    if device == "cpu" and interpreted:
        console.print(f"  in Triton's interpreter (no CUDA device): {', '.join(interpreted)}", soft_wrap=True)
    console.print("[bold]rollouts[/bold]")
    for line in recording.told() or ["none recorded: importance ratios are generated, not a sampler's own"]:
        console.print(f"  {line}", soft_wrap=True, markup=False)
    here = vllm_engine.distribution()
    console.print(
        f"  engine here: {here or 'no vLLM; pip install .[vllm] on a GPU box, make rollouts without one'}", markup=False
    )
    other = [("uv", "environments of other versions (parity run --with)"), ("git", "the revision in reports")]
    for tool, purpose in other:
        there = shutil.which(tool) is not None or importlib.util.find_spec(tool) is not None
        console.print(f"[bold]{tool}[/bold]\n  {'found' if there else f'missing: install {tool}'}; for {purpose}")
    return 0 if ready else 3


def _device_text(device: str) -> str:
    import torch

    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        return f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}"
    built = "torch was built without CUDA" if torch.version.cuda is None else "torch has CUDA but sees no device"
    return f"{os.cpu_count()} cores, Python {sys.version.split()[0]}; {built}, Triton kernels run in its interpreter"
