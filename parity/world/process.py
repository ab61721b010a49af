"""What a process has of the operating system: environment, signals, limits, streams, threads, children."""

import _signal
import contextlib
import fcntl
import inspect
import locale
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from parity.world.watch import Watch


def _variables() -> dict[bytes, bytes]:
    """As `os.environ` keeps them: to read them by it decodes each."""
    return dict(vars(os.environ)["_data"])


def _environment(before: dict[bytes, bytes], now: dict[bytes, bytes]) -> list[str]:
    keys = sorted(k for k in before.keys() | now.keys() if before.get(k) != now.get(k))
    return [f"environment variable {os.fsdecode(k)}" for k in keys[:3]]


def _put_environment(value: dict[bytes, bytes]) -> None:
    os.environb.clear()
    os.environb.update(value)


SIGNALS = tuple(map(int, signal.valid_signals()))


def _signals() -> dict[int, Any]:
    return {s: _signal.getsignal(s) for s in SIGNALS}  # `signal.getsignal` looks each handler up in an enum


def _put_signals(value: dict[int, Any]) -> None:
    for number, handler in value.items():
        if handler is not None and _signal.getsignal(number) is not handler:
            signal.signal(number, handler)


TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)


def _timers() -> tuple[bool, ...]:
    """Which run: one that is left on strikes a later party."""
    return tuple(signal.getitimer(t)[0] > 0 for t in TIMERS)


def _put_timers(value: tuple[bool, ...]) -> None:
    for timer, on in zip(TIMERS, value, strict=True):
        if not on:
            signal.setitimer(timer, 0)


LIMITS = (resource.RLIMIT_NOFILE, resource.RLIMIT_DATA, resource.RLIMIT_CPU)


def _put_limits(value: tuple[tuple[int, int], ...]) -> None:
    for which, (soft, hard) in zip(LIMITS, value, strict=True):
        resource.setrlimit(which, (soft, hard))


def _umask() -> int:
    mask = os.umask(0o22)
    os.umask(mask)
    return mask


def _scheduling() -> tuple[int, frozenset[int]]:
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ()
    return os.getpriority(os.PRIO_PROCESS, 0), frozenset(cores)


def _put_scheduling(value: tuple[int, frozenset[int]]) -> None:
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, value[0])
    if value[1]:
        os.sched_setaffinity(0, value[1])


_spare: dict[tuple[int, tuple[int, int]], int] = {}
SPARE = 12
"""Copies of standard descriptors that are kept to put one back from: what they were lately."""


def _descriptor(number: int) -> tuple[int, int] | None:
    """Which file a standard descriptor is, None for a closed one; a copy of it is kept."""
    try:
        about = os.fstat(number)
    except OSError:
        return None
    which = about.st_dev, about.st_ino
    if (number, which) not in _spare:
        _spare[number, which] = fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, 64)
        if len(_spare) > SPARE:
            os.close(_spare.pop(next(iter(_spare))))
    return which


def _streams() -> tuple[Any, ...]:
    streams = sys.stdin, sys.stdout, sys.stderr
    return (*streams, *(getattr(s, "closed", False) for s in streams), *map(_descriptor, (0, 1, 2)))


def _put_streams(value: tuple[Any, ...]) -> None:
    for number, which in enumerate(value[6:]):
        if which is not None and _descriptor(number) != which and (number, which) in _spare:
            os.dup2(_spare[number, which], number)
    streams = list(value[:3])
    for number, closed in enumerate(value[3:6]):
        if getattr(streams[number], "closed", False) and not closed:  # what was written to it is lost from here on
            streams[number] = open(os.devnull, "r+")  # noqa: SIM115 as long as the process
    sys.stdin, sys.stdout, sys.stderr = streams


def helpers(idents: Collection[int | None]) -> bool:
    """Whether these threads are all daemons in the code of an installed package: the monitor of a progress bar, a compiler's.

    A user's own thread may go on to change what others are judged by.
    """
    threads = [t for t in threading.enumerate() if t.ident in idents]
    return all(t.daemon and _installed(getattr(t, "_target", None) or type(t).run) for t in threads)


def _installed(function: Callable[..., Any]) -> bool:
    code = getattr(inspect.unwrap(getattr(function, "__func__", function)), "__code__", None)
    return code is not None and not {"site-packages", "dist-packages"}.isdisjoint(Path(code.co_filename).parts)


def _descriptors() -> frozenset[str]:
    try:
        return frozenset(os.listdir("/proc/self/fd"))
    except OSError:
        return frozenset()


_ANY_CHILD = os.WEXITED | os.WNOHANG | os.WNOWAIT | 0x40000000
"""Options of waitid that tell of children and wait for none; the last is Linux's __WALL: of those that clone() made, too."""


def _children() -> frozenset[int]:
    found: set[int] = set()
    try:
        os.waitid(os.P_ALL, 0, _ANY_CHILD)
    except ChildProcessError:
        return frozenset()  # as a rule, and three files of /proc need not be read
    except OSError:  # no Linux, or one before 4.7
        pass
    with contextlib.suppress(OSError):
        for task in os.listdir("/proc/self/task"):
            found.update(map(int, Path(f"/proc/self/task/{task}/children").read_text().split()))
    return frozenset(found)


def _more(what: str) -> Callable[[Any, Any], list[str]]:
    """Names what is left behind; what is gone is none of our business."""

    def named(before: Any, now: Any) -> list[str]:
        left = len(set(now) - set(before))
        return [f"{left} {what} left {'open' if what.startswith('file') else 'running'}"] if left else []

    return named


WATCHES: tuple[Watch, ...] = (
    Watch("environment variables", _variables, _put_environment, _environment),
    Watch("working folder", os.getcwd, os.chdir),
    Watch("umask", _umask, os.umask),
    Watch("locale", lambda: locale.setlocale(locale.LC_ALL), lambda value: locale.setlocale(locale.LC_ALL, value)),
    Watch("signal handlers", _signals, _put_signals),
    Watch("timers", _timers, _put_timers),
    Watch(
        "blocked signals",
        lambda: frozenset(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        lambda mask: signal.pthread_sigmask(signal.SIG_SETMASK, mask),
    ),
    Watch("resource limits", lambda: tuple(map(resource.getrlimit, LIMITS)), _put_limits),
    Watch("standard streams", _streams, _put_streams),
    Watch("scheduling", _scheduling, _put_scheduling),
    Watch("threads", lambda: {t.ident for t in threading.enumerate()}, None, _more("thread"), kept=False),
    Watch("file descriptors", _descriptors, None, _more("file descriptor"), kept=False),
    Watch("child processes", _children, None, _more("process"), kept=False),
)
