"""Settings of a process in which losses run: environment variables, threads, float32 precision, its parent."""

import contextlib
import ctypes
import functools
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

WATCHED = "PARITY_WATCHED"
"""Environment variable by which a child is told where to report to: "DESCRIPTOR:NONCE:PID OF THE PARENT"."""
SCRATCH = "PARITY_SCRATCH"  # environment variable of a worker: the folder of its run for what it leaves on disk
WITH = "PARITY_WITH"
"""Environment variable with the options `--with` of a command that was started in an environment of other versions."""
PACKAGES = ("site-packages", "dist-packages")  # where pip installs; the second is that of Debian's own Python
_PR_SET_PDEATHSIG = 1
_told: tuple[int, str, int] | None = None


def packaged(file: str) -> str | None:
    """`package/module.py` of an installed file; None for one that is not in PACKAGES."""
    parts = Path(file).parts
    at = next((i for i, part in enumerate(parts) if part in PACKAGES), None)
    return None if at is None else "/".join(parts[at + 1 :])


NOT_INSTALLED = " is not installed: pip install "  # in the message of a row of which a library is missing


@functools.cache
def installed(distribution: str) -> str | None:
    """The installed version of a distribution, or None."""
    from importlib import metadata

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def scratch_folder(name: str) -> str:
    """A new folder for this process, in that of its run, which goes when the run ends however this process does; whoever has
    removed that one costs nobody else's results. Outside a run it goes with the process."""
    import atexit
    import shutil
    import tempfile

    if folder := os.environ.get(SCRATCH):
        os.makedirs(folder, exist_ok=True)
    made = tempfile.mkdtemp(prefix=f"parity-{name}-", dir=folder)
    if not folder:
        atexit.register(shutil.rmtree, made, ignore_errors=True)
    return made


def elsewhere() -> str:
    """What a command line needs besides to run in this environment: ` --with PKG==VER` in one of other versions, else nothing."""
    words = os.environ.get(WITH, "")
    return f" {words}" if words else ""


def interpreter(target: str) -> list[str]:
    """The command of a child that calls `module:function` of this package, of these files though others are installed. Its
    path is safe (`-P`): a folder `trl/` where the user stands is not the installed trl."""
    module, _, function = target.partition(":")
    root = str(Path(__file__).resolve().parent.parent)
    own = f"import sys; sys.path.insert(0, {root!r}); import parity; sys.path.append(sys.path.pop(0))"
    program = f"{own}; from {module} import {function} as f; sys.exit(f(*sys.argv[1:]))"
    return [sys.executable, "-P", "-c", program]


def under_watch() -> None:
    """Take the environment's word for who watches this process, if anyone does, and be killed when that one dies, however it
    dies (Linux; elsewhere its own handlers must do). Descendants are not told."""
    global _told
    word = os.environ.pop(WATCHED, "")
    if not word:
        return
    descriptor, nonce, parent = word.split(":")
    os.set_inheritable(int(descriptor), False)
    _told = int(descriptor), nonce, os.getpid()
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != int(parent):  # it died before we asked
            os._exit(1)


def tell(**event: Any) -> None:
    """Report to the process that watches this one, if one does; a fork of it is not heard. Raises ValueError for a NaN."""
    if _told is not None and _told[2] == os.getpid():
        descriptor, nonce, pid = _told
        line = f"{nonce} {pid} {json.dumps(event, allow_nan=False)}\n".encode()
        while line:
            line = line[os.write(descriptor, line) :]


def environment(device: str) -> dict[str, str]:
    """Environment variables of a worker: no hub, quiet libraries, and Triton's interpreter where there is no GPU."""
    out = {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
        "PYTHONHASHSEED": "0",  # transformers builds parts of Gemma-4 and ModernBERT in the order of a set
        "TRL_EXPERIMENTAL_SILENCE": "1",
        "UNSLOTH_IS_PRESENT": "1",
        "UNSLOTH_ALLOW_CPU": "1",
        "PYTHONWARNINGS": "ignore",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TORCHINDUCTOR_AUTOGRAD_CACHE": "0",  # torch 2.13: a third value of a clamp's limit gets the program of the second
    }
    return out | ({"TRITON_INTERPRET": "1"} if device == "cpu" else {})


def prepare(device: str) -> None:
    """Settings that hold for every implementation and are recorded in the header: full float32 products, no tf32."""
    for name, value in environment(device).items():
        os.environ.setdefault(name, value)
    if device == "cuda":
        os.environ.pop("TRITON_INTERPRET", None)  # the header says "compiled"
    import torch

    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    import torch._dynamo.config
    import torch._inductor.config  # imported before the first snapshot: it sets environment variables

    torch._dynamo.config.recompile_limit = 10_000  # shapes differ from case to case here, as they do not in training
    torch._dynamo.config.accumulated_recompile_limit = 10_000
    if device == "cpu":  # those of weights too; else each case costs g++ two seconds
        torch._dynamo.config.force_parameter_static_shapes = False
    logging.getLogger("torch._dynamo").setLevel(logging.CRITICAL)


class Terminated(KeyboardInterrupt):
    """The process was asked to end (SIGTERM): as Ctrl-C, with an exit code of its own."""


@contextlib.contextmanager
def stopping() -> Iterator[None]:
    """SIGTERM ends what runs here as Ctrl-C does: children ended, folders removed, what there is reported."""

    def asked(number: int, frame: Any) -> None:
        raise Terminated

    if threading.current_thread() is not threading.main_thread():  # Python sets handlers in the main thread alone
        yield
        return
    before = signal.signal(signal.SIGTERM, asked)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
