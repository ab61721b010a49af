"""`parity doctor`: what is installed, what can run here, what is missing and how to get it. Downloads nothing."""

import importlib.util
import os
import shutil
import sys

import torch
from packaging.version import Version
from rich.console import Console

from parity import recording
from parity.implementations.implementation import Implementation
from parity.process import installed
from parity.registry import load
from parity.rollouts import vllm_engine
from parity.running import gpu
from parity.running.provenance import resolve_device, versions
from parity.versions.environment import environments_root

TOOLS = {"uv": "environments of other versions (parity run --with)", "git": "the revision in reports"}


def diagnose(console: Console) -> bool:
    """Print it all; whether anything can run here."""

    def part(title: str, *lines: str) -> None:
        console.print(title, style="bold")
        for line in lines:
            console.print(f"  {line}", soft_wrap=True, markup=False)

    device = resolve_device("auto")
    problems = [gpu.unusable(), *((gpu.no_triton(), unsafe_lock()) if device == "cuda" else ())]
    ready: list[Implementation] = []
    blocked: dict[str, list[str]] = {}
    for item in load().values():
        if why := item.missing():
            blocked.setdefault(str(why), []).append(item.id)
        else:
            ready.append(item)
    part("installed", ", ".join(f"{k} {v}" for k, v in versions().items()))
    if device == "cuda":
        it = torch.cuda.get_device_properties(0)
        about = f"{it.name}, {it.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}"
    else:
        built = "torch was built without CUDA" if torch.version.cuda is None else "torch has CUDA but sees no device"
        here = f"{os.cpu_count()} cores, Python {sys.version.split()[0]}"
        about = f"{here}; {built}, Triton kernels run in its interpreter"
    part("device", f"{device}: {about}", *filter(None, problems))
    compiler = shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++") or shutil.which("clang++")
    part("C++ compiler", compiler or "none: torch.compile paths crash (Debian: apt-get install g++)")
    can = [f"{len(ready)} can run here, {sum(map(len, blocked.values()))} cannot"]
    can += [f"{', '.join(ids)}: {reason}" for reason, ids in sorted(blocked.items())]
    if interpreted := [i.id for i in ready if i.interpreted and device == "cpu"]:
        can.append(f"in Triton's interpreter (no CUDA device): {', '.join(interpreted)}")
    part("implementations", *can)
    engine = vllm_engine.distribution() or "no vLLM; pip install .[vllm] on a GPU box, make rollouts without one"
    kept = [recording.named(name) for name in recording.shipped()]
    by = ", ".join(sorted({str(one.facts["engine"]) for one in kept}))
    part(
        "rollouts",
        f"{len(kept)} recordings by {by or 'nobody: importance ratios are generated'}; engine here: {engine}",
    )
    for tool, purpose in TOOLS.items():
        found = shutil.which(tool) or importlib.util.find_spec(tool)
        part(tool, f"{'found' if found else f'missing: install {tool}'}; for {purpose}")
    part("environments", f"in {environments_root()}; those unused for 30 days go when another is made")
    return bool(ready)


def unsafe_lock() -> str | None:
    """Whether cut-cross-entropy's kernels, as Triton compiles them, release a lock too early: those of 25.1.1 do under Triton 3.2
    to 3.8 by the PTX of an H100, and not under 3.9."""
    cce, triton = installed("cut-cross-entropy"), installed("triton")
    if cce != "25.1.1" or triton is None or not Version("3.2") <= Version(triton) < Version("3.9"):
        return None
    which = f"cut-cross-entropy {cce} compiled by Triton {triton}"
    harm = "on CUDA its gradients and log-probs may lose additions; Triton 3.9 compiles it rightly"
    return f"{which} releases its locks before all stores are done: {harm}"
