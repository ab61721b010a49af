"""Faults that end a CUDA context: every later call of the process fails, so a fresh process must go on."""

import contextlib
import gc
import mmap
import os
from collections.abc import Iterator
from typing import BinaryIO

import torch

STICKY = (
    "device-side assert triggered",
    "an illegal memory access was encountered",
    "an illegal instruction was encountered",
    "misaligned address",
    "operation not supported on global/shared address space",
    "invalid program counter",
    "hardware stack error",
    "unspecified launch failure",
    "the launch timed out and was terminated",
    "uncorrectable ECC error encountered",
)
"""Words of the errors after which "the process must be terminated and relaunched" (CUDA Runtime API, `cudaError`)."""
MEMORY = ("can't allocate memory", "Cannot allocate memory", "CUDA error: out of memory")
"""Torch's words for too little memory that are no `torch.OutOfMemoryError`: on the CPU, and outside its own allocator."""
BLOCKING = "CUDA_LAUNCH_BLOCKING"
"""With it CUDA waits after every launch, so that an error is raised where its kernel was launched."""
PARTS = ("forward pass", "backward pass", "call")
WIDTH = 16
_lost: list[str] = []
_places: list[tuple[int, mmap.mmap]] = []
_parts = [""]


def sticky(error: BaseException) -> bool:
    """Whether this error of torch or Triton says that the CUDA context is lost."""
    try:
        text = str(error)
    except Exception:  # an error of a user's that has no words for itself
        return False
    return says(f"CUDA: {text}" if "cuda" in type(error).__module__ else text)


def says(text: str) -> bool:
    """Whether these are words of a lost CUDA context."""
    return "CUDA" in text and any(words in text for words in STICKY)


def keep_place(file: BinaryIO) -> None:
    """From now on this process keeps in a file which part of an implementation it runs: it stays there if the process ends."""
    os.ftruncate(file.fileno(), WIDTH)
    _places[:] = [(os.getpid(), mmap.mmap(file.fileno(), WIDTH))]
    _tell()


@contextlib.contextmanager
def running(part: str) -> Iterator[None]:
    """Code under test runs here: its "forward pass", its "backward pass", or its "call"."""
    _parts.append(part)
    _tell()
    try:
        yield
    finally:
        _parts.pop()
        _tell()


def _tell() -> None:
    for pid, place in _places:
        if pid == os.getpid():  # a fork tells nothing
            place[:] = f"{_parts[-1]:<{WIDTH}}".encode()


def kept_place(file: BinaryIO) -> str:
    """The part that ran when the process ended that keeps its place there; "" where none did."""
    part = os.pread(file.fileno(), WIDTH, 0).decode(errors="replace").strip()
    return part if part in PARTS else ""


def lose(message: str) -> None:
    """This process has no CUDA context any more."""
    _lost.append(message)


def lost() -> str:
    """Why this process has no CUDA context any more; empty where it has."""
    return _lost[0] if _lost else ""


def blocking() -> bool:
    """Whether an error is raised at the launch of its kernel in this process."""
    return os.environ.get(BLOCKING) == "1"


def released() -> None:
    """After too much memory was asked for: hand back what torch keeps, for whoever comes next."""
    if torch.cuda.is_initialized():
        gc.collect()
        torch.cuda.empty_cache()
