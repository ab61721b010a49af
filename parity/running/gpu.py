"""The GPUs of a box: whether torch and Triton can use them, why not, and which one each worker sees."""

import contextlib
import glob
import os
import re
import signal
import subprocess
import sysconfig
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from parity.process import environment, interpreter, packaged

OWN, STDLIB = str(Path(__file__).parents[1]), sysconfig.get_path("stdlib")
DEVICE_FILES = "/dev/nvidia[0-9]*"
SECONDS = 300.0  # on the clock: longer than that no kernel takes to be compiled and run
WHERE = signal.SIGUSR2
"""Asks a worker to write its stacks to stderr; `faulthandler` does so in C, while Python waits for a kernel."""


def unusable() -> str | None:
    """Why a box that has a GPU cannot run on it, with the remedy; None where it can, or where there is none.
    `CUDA_VISIBLE_DEVICES` set to nothing is the caller's wish, and no fault."""
    import torch

    if not glob.glob(DEVICE_FILES) or torch.cuda.is_available():
        return None
    if os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1"):
        return None
    if torch.version.cuda is None:
        return "this box has a GPU, and torch was built without CUDA: install a CUDA build, or say --device cpu"
    try:
        torch.cuda.init()
    except Exception as error:
        why = f"torch {torch.__version__} cannot use it ({str(error).strip().splitlines()[0]})"
    else:
        why = f"torch {torch.__version__} sees no CUDA device"
    return f"this box has a GPU, and {why}: update the driver, or say --device cpu"


def no_triton() -> str | None:
    """Why Triton cannot compile here: one kernel is compiled and run in a process of its own; None where it can."""
    command = interpreter("parity.running.one_kernel:main")
    try:
        done = subprocess.run(command, env=child("cuda"), capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return f"Triton compiles no kernel here: no answer in {SECONDS:.0f} s"
    if not done.returncode:
        return None
    said = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), f"exit code {done.returncode}")
    remedy = "it needs a C compiler and Python's headers (Debian: apt-get install gcc python3-dev), or say --device cpu"
    return f"Triton compiles no kernel here ({said.strip()[:200]}): {remedy}"


def visible() -> list[str]:
    """The GPUs that this process may use, as `CUDA_VISIBLE_DEVICES` names them."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [name.strip() for name in named.split(",") if name.strip()]
    import torch

    return [str(i) for i in range(torch.cuda.device_count())]


def child(device: str, gpu: str | None = None) -> Mapping[str, str]:
    """The environment of a worker: without `TRITON_INTERPRET` on CUDA, without a GPU on the CPU, with one where `gpu`
    says. One visible device a process: a Trainer that sees two wraps its model in DataParallel."""
    env = dict(os.environ) | environment(device)
    if device == "cpu":
        return env | {"CUDA_VISIBLE_DEVICES": ""}
    env.pop("TRITON_INTERPRET", None)
    return env if gpu is None else env | {"CUDA_VISIBLE_DEVICES": gpu}


def cause(lines: Sequence[str]) -> str:
    """The line of a dead process's stderr that says why: a CUDA error or a failed assertion before advice that follows it."""
    stripped = [line.strip() for line in lines if line.strip()]
    for sign in ("CUDA error", "Assertion", "out of memory", "Error:", "Fatal Python error: "):
        found = [line for line in stripped if sign in line]
        if found:
            return found[-1] if sign == "Error:" else found[0]
    return stripped[-1] if stripped else ""


def where(process: subprocess.Popen[str], said: Callable[[], str], seconds: float = 2.0) -> str:
    """ "; in file:line function" of a worker that does not answer, in a library's code if it is in one; `said`: its stderr."""
    had = len(said())
    with contextlib.suppress(OSError):
        process.send_signal(WHERE)
    until = time.monotonic() + seconds
    while len(said()) == had and time.monotonic() < until and process.poll() is None:
        time.sleep(0.05)
    time.sleep(0.05)
    found = deepest(said()[had:])
    return f"; in {found}" if found else ""


def deepest(stacks: str) -> str:
    """`file:line function` of what `faulthandler` wrote: the deepest frame of a library, or the deepest."""
    frames = re.findall(r'File "(.+)", line (\d+) in (.+)', stacks)
    other = rf"-packages/(torch|triton)/|^({re.escape(OWN)}|{re.escape(STDLIB)})/(?!\w+-packages/)|<"
    theirs = [f for f in frames if not re.search(other, f[0])]
    file, line, name = next(iter(theirs or frames), ("", "", ""))
    return f"{packaged(file) or file}:{line} {name}" if file else ""
