"""The GPUs of a box: whether torch and Triton can use them, why not, and which one each worker sees."""

import glob
import os
import signal
import subprocess
from collections.abc import Mapping

from parity.process import environment, interpreter

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
