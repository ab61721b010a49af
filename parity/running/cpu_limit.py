"""Limit the CPU time of a process, so that a busy machine ends none, and end a process that hangs."""

import contextlib
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

BACKSTOP = 6.0
"""Wall-clock limit ÷ CPU limit: what a process waits for burns no CPU. Where the kernel does not say how long a process waited
for a core, one of six on a core is not yet hanging."""
INTERVAL = 0.5
"""Seconds between two looks at a running process."""


class LimitExceeded(Exception):
    """A process was ended; the message says which of its two limits it had reached."""


def run(
    argv: Sequence[str], *, cpu: float, clock: float | None = None, stdin: str | None = None, **popen: Any
) -> subprocess.CompletedProcess[str]:
    """`subprocess.run` of a text command, ended with all its children at `cpu` seconds of CPU time of them together.

    Or at `clock` seconds on the clock, by default BACKSTOP times as many, in which it did not wait for a core. CPU time is
    user and system time of the process, its living descendants and those that were waited for; a descendant whose parent
    ended before it is not seen. `popen` goes to subprocess.Popen. Raises LimitExceeded.
    """
    start, spent, waited, latest = time.monotonic(), 0.0, 0.0, BACKSTOP * cpu if clock is None else clock
    with contextlib.ExitStack() as stack:
        if stdin is not None:  # a file: a second `communicate` does not go on with an input that the first began
            file = stack.enter_context(tempfile.TemporaryFile("w+"))
            file.write(stdin)
            file.seek(0)
            popen["stdin"] = file
        process = stack.enter_context(subprocess.Popen(list(argv), text=True, **popen))
        try:
            while True:
                try:
                    out, err = process.communicate(timeout=INTERVAL)
                    return subprocess.CompletedProcess(list(argv), process.returncode, out, err)
                except subprocess.TimeoutExpired:
                    spent, waited = max(spent, cpu_time(process.pid)), max(waited, starved(process.pid))
                passed = time.monotonic() - start - waited
                if spent > cpu:
                    raise LimitExceeded(f"used {spent:.1f} s of CPU time, its limit is {cpu:g} s")
                if passed > latest:
                    raise LimitExceeded(f"no answer in {passed:.0f} s, having used {spent:.1f} s of CPU time")
        except BaseException:
            end(process.pid)
            raise


def _tree(pid: int) -> list[psutil.Process]:
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def cpu_time(pid: int) -> float:
    """Seconds of CPU time that a process, its living descendants and those that it waited for have used so far."""
    total = 0.0
    for one in _tree(pid):
        try:
            times = one.cpu_times()
        except psutil.NoSuchProcess:  # its parent has waited for it meanwhile, and answers for it at the next look
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total


def starved(pid: int) -> float:
    """Seconds that the main threads of a process and its living descendants were ready and had no core; 0 where unknown."""
    total = 0.0
    for one in _tree(pid):
        with contextlib.suppress(OSError, IndexError):  # it has ended; no Linux, or one without these counts
            total += int(Path(f"/proc/{one.pid}/schedstat").read_text().split()[1]) * 1e-9
    return total


def end(pid: int) -> None:
    """Kill a process and its descendants: one that went on would hold the pipes open, and the reader with them."""
    for one in _tree(pid):
        try:
            one.kill()
        except psutil.NoSuchProcess:
            continue
