"""What else a process has that all parties share: one record for each, that reads it and puts it back."""

from __future__ import annotations

import _signal
import contextlib
import dataclasses
import faulthandler
import fcntl
import gc
import locale
import logging
import os
import random
import resource
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.modules import module as nn_module
from torch.utils._device import DeviceContext

from parity.world.bindings import VERSIONED, version


@dataclasses.dataclass(frozen=True)
class Watch:
    """One thing that a call must leave alone: `get` reads it, `put` restores what `get` gave.

    `named` tells from both readings what changed, where the name alone says too little. Without `put` nothing can undo
    it: see `Snapshot.restore`. `kept`: what a user's file sets at import stays in force for its own calls.
    """

    name: str
    get: Callable[[], Any]
    put: Callable[[Any], Any] | None = None
    named: Callable[[Any, Any], list[str]] | None = None
    kept: bool = True

    def differences(self, before: Any, now: Any) -> list[str]:
        """How the change is named."""
        return self.named(before, now) if self.named else [f"{self.name} changed"]


def _environment(before: dict[str, str], now: dict[str, str]) -> list[str]:
    keys = sorted(k for k in before.keys() | now.keys() if before.get(k) != now.get(k))
    return [f"environment variable {k}" for k in keys[:3]]


def _put_environment(value: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(value)


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


def _limits() -> tuple[tuple[int, int], ...]:
    return tuple(resource.getrlimit(r) for r in (resource.RLIMIT_NOFILE, resource.RLIMIT_DATA, resource.RLIMIT_CPU))


def _put_limits(value: tuple[tuple[int, int], ...]) -> None:
    for which, (soft, hard) in zip(
        (resource.RLIMIT_NOFILE, resource.RLIMIT_DATA, resource.RLIMIT_CPU), value, strict=True
    ):
        resource.setrlimit(which, (soft, hard))


def _umask() -> int:
    mask = os.umask(0o22)
    os.umask(mask)
    return mask


def _numpy_state() -> Any:
    kind, keys, *rest = np.random.get_state(legacy=True)  # noqa: NPY002 the global one is what is watched
    return kind, np.asarray(keys).tobytes(), *rest


def _put_numpy(value: Any) -> None:
    kind, keys, *rest = value
    np.random.set_state((kind, np.frombuffer(keys, np.uint32), *rest))  # noqa: NPY002


def _torch_rng() -> bytes:
    return torch.get_rng_state().numpy().tobytes()


def _put_torch_rng(value: bytes) -> None:
    torch.set_rng_state(torch.frombuffer(bytearray(value), dtype=torch.uint8))


def _cuda_rng() -> tuple[bytes, ...]:
    return tuple(s.numpy().tobytes() for s in torch.cuda.get_rng_state_all()) if torch.cuda.is_initialized() else ()


def _put_cuda_rng(value: tuple[bytes, ...]) -> None:
    if value:
        torch.cuda.set_rng_state_all([torch.frombuffer(bytearray(v), dtype=torch.uint8) for v in value])


def _autocast() -> tuple[Any, ...]:
    return tuple((d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda"))


def _put_autocast(value: tuple[Any, ...]) -> None:
    for device, enabled, dtype in value:
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, dtype)


def _deterministic() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def matmul_precision() -> str:
    """`torch.get_float32_matmul_precision()`; "mixed" where it raises: somebody set torch's newer `fp32_precision`."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return "mixed"


SWITCHES: tuple[tuple[Any, str], ...] = (
    (torch.backends.cudnn, "enabled"),
    (torch.backends.cudnn, "benchmark"),
    (torch.backends.cudnn, "deterministic"),
    (torch.backends.cudnn, "allow_tf32"),
    (torch.backends.cuda.matmul, "allow_tf32"),
    (torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction"),
    (torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction"),
    (torch.backends.mkldnn, "enabled"),
    (torch.utils.deterministic, "fill_uninitialized_memory"),
)
_SDP = ("flash_sdp", "mem_efficient_sdp", "math_sdp", "cudnn_sdp")


def _switches() -> tuple[bool | str, ...]:
    sdp = [getattr(torch.backends.cuda, f"{name}_enabled")() for name in _SDP]
    return tuple(_switch(owner, name) for owner, name in SWITCHES) + tuple(sdp)


def _switch(owner: Any, name: str) -> bool | str:
    """A switch; "mixed" where somebody set torch's newer `fp32_precision`, beside which `allow_tf32` raises."""
    try:
        return bool(getattr(owner, name))
    except RuntimeError:
        return "mixed"


def _put_switches(value: tuple[bool | str, ...]) -> None:
    for (owner, name), on in zip(SWITCHES, value, strict=False):
        if _switch(owner, name) != on:
            setattr(owner, name, on)
    for name, on in zip(_SDP, value[len(SWITCHES) :], strict=True):
        getattr(torch.backends.cuda, f"enable_{name}")(on)


def _named_switches(before: tuple[bool | str, ...], now: tuple[bool | str, ...]) -> list[str]:
    names = [
        f"{owner.__name__ if hasattr(owner, '__name__') else 'torch.backends.cuda.matmul'}.{name}"
        for owner, name in SWITCHES
    ]
    names += [f"torch.backends.cuda.{name}" for name in _SDP]
    return [f"switch {n} changed" for n, a, b in zip(names, before, now, strict=True) if a != b]


_TINY = [5e-324]


def _flushes() -> bool:
    """Whether subnormal numbers count as 0 on this thread: torch can set it and not say it."""
    return _TINY[0] * 1.0 == 0.0


def _modes() -> tuple[int, int]:
    """How many are entered; the default device, which torch keeps at the bottom as a mode, is an entry of its own."""
    depth = torch._C._len_torch_function_stack()
    functions = sum(not isinstance(torch._C._get_function_stack_at(k), DeviceContext) for k in range(depth))
    return functions, torch._C._len_torch_dispatch_stack()


def _put_modes(value: tuple[int, int]) -> None:
    while _modes()[0] > value[0]:
        torch._C._pop_torch_function_stack()
    while torch._C._len_torch_dispatch_stack() > value[1]:
        torch._C._pop_torch_dispatch_stack(None)


HOOKS = tuple(n for n in vars(nn_module) if n.startswith("_global_") and isinstance(vars(nn_module)[n], dict))
"""Hooks on every module of the process."""


def _put_hooks(value: tuple[dict[int, Any], ...]) -> None:
    for name, hooks in zip(HOOKS, value, strict=True):
        table = vars(nn_module)[name]
        table.clear()
        table.update(hooks)


def _interpreter() -> tuple[Any, ...]:
    hooks = sys.excepthook, sys.displayhook, sys.unraisablehook, threading.excepthook
    traced = sys.gettrace(), sys.getprofile(), threading.gettrace(), threading.getprofile()
    return (
        sys.getrecursionlimit(),
        (gc.isenabled(), gc.get_threshold(), tuple(gc.callbacks)),
        traced,
        hooks,
        (sys.getswitchinterval(), sys.dont_write_bytecode, tuple(sys.argv), faulthandler.is_enabled()),
    )


def _put_interpreter(value: tuple[Any, ...]) -> None:
    limit, (collecting, thresholds, callbacks), traced, hooks, (interval, unwritten, argv, fatal) = value
    sys.setrecursionlimit(limit)
    (gc.enable if collecting else gc.disable)()
    gc.set_threshold(*thresholds)
    gc.callbacks[:] = callbacks
    if sys.gettrace() is not traced[0]:
        sys.settrace(traced[0])
    if sys.getprofile() is not traced[1]:  # Python cannot set one in C again: cProfile's
        sys.setprofile(traced[1])
    threading.settrace(traced[2])
    threading.setprofile(traced[3])
    sys.excepthook, sys.displayhook, sys.unraisablehook, threading.excepthook = hooks
    sys.setswitchinterval(interval)
    sys.dont_write_bytecode, sys.argv[:] = unwritten, argv
    (faulthandler.enable if fatal else faulthandler.disable)()


TABLES = (("parity.recipe", "UNIT_ROUNDOFF HALF_SUBNORMAL LARGEST"), ("parity.case.case", "DTYPES"))
"""Numbers of the judge that stand in a dictionary, which is the same one when it is written to."""


def _tables() -> tuple[dict[Any, Any], ...]:
    found = [(sys.modules[module], names.split()) for module, names in TABLES if module in sys.modules]
    return tuple(dict(getattr(module, name)) for module, names in found for name in names)


def _put_tables(value: tuple[dict[Any, Any], ...]) -> None:
    found = [(sys.modules[module], names.split()) for module, names in TABLES if module in sys.modules]
    for table, was in zip((getattr(m, name) for m, names in found for name in names), value, strict=False):
        table.clear()
        table.update(was)


def _finders() -> tuple[Any, ...]:
    """What finds modules; not what an installed package added when it was imported."""

    def installed(finder: Any) -> bool:
        kind = finder if isinstance(finder, type) else type(finder)
        return "-packages" in str(getattr(sys.modules.get(kind.__module__), "__file__", ""))

    return tuple(f for f in sys.meta_path if not installed(f)), tuple(sys.path_hooks)


def _put_finders(value: tuple[Any, ...]) -> None:
    now = _finders()[0]
    sys.meta_path[:] = [*value[0], *(f for f in sys.meta_path if f not in now)]
    sys.path_hooks[:] = value[1]


_modules: dict[str, Any] = {}
_seen: tuple[int, int] | None = None
"""Which dictionary `sys.modules` was, and its version."""


def _loaded() -> dict[str, Any]:
    """A copy of `sys.modules`, the last one where nothing changed since."""
    global _modules, _seen
    now = (id(sys.modules), version(sys.modules).value) if VERSIONED else None
    if now is None or now != _seen:
        _seen = now
        if sys.modules != _modules:
            _modules = dict(sys.modules)
    return _modules


def _gone(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    names = [name for name, module in before.items() if now.get(name) is not module]
    return [f"sys.modules[{name!r}] changed" for name in names[:3]]


def _logging() -> tuple[Any, ...]:
    found = [logging.root, *(logging.getLogger(name) for name in ("torch", "transformers", "trl"))]
    loggers = [(one, one.level, one.disabled, one.propagate, tuple(one.handlers)) for one in found]
    return logging.root.manager.disable, logging.getLoggerClass(), *loggers


def _put_logging(value: tuple[Any, ...]) -> None:
    disable, kind, *loggers = value
    logging.disable(disable)
    logging.setLoggerClass(kind)
    for one, level, one.disabled, one.propagate, handlers in loggers:
        one.setLevel(level)
        one.handlers[:] = handlers


def _printing() -> tuple[dict[str, Any], dict[str, Any]]:
    return dict(vars(torch._tensor_str.PRINT_OPTS)), dict(np.get_printoptions())


def _put_printing(value: tuple[dict[str, Any], dict[str, Any]]) -> None:
    vars(torch._tensor_str.PRINT_OPTS).update(value[0])
    np.set_printoptions(**value[1])


def _scheduling() -> tuple[int, frozenset[int]]:
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ()
    return os.getpriority(os.PRIO_PROCESS, 0), frozenset(cores)


def _put_scheduling(value: tuple[int, frozenset[int]]) -> None:
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, value[0])
    if value[1]:
        os.sched_setaffinity(0, value[1])


def _saved_hooks() -> Any:
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def _put_saved_hooks(value: Any) -> None:
    while (now := _saved_hooks()) is not None and now != value:
        torch._C._autograd._pop_saved_tensors_default_hooks()


def _put_path(value: tuple[str, ...]) -> None:
    sys.path[:] = value


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


def _put_locale(value: str) -> None:
    locale.setlocale(locale.LC_ALL, value)


def _put_filters(value: tuple[Any, ...]) -> None:
    warnings.resetwarnings()
    warnings.filters[:] = list(value[0])  # type: ignore[index]
    warnings.showwarning, warnings.formatwarning = value[1:]


def _descriptors() -> frozenset[str]:
    try:
        return frozenset(os.listdir("/proc/self/fd"))
    except OSError:
        return frozenset()


def _children() -> frozenset[int]:
    found: set[int] = set()
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


def _threads() -> frozenset[int]:
    return frozenset(t.ident or 0 for t in threading.enumerate())


WATCHES: tuple[Watch, ...] = (
    Watch("torch modes", _modes, _put_modes),
    Watch("environment variables", lambda: dict(os.environ), _put_environment, _environment),
    Watch("working folder", os.getcwd, os.chdir),
    Watch("umask", _umask, os.umask),
    Watch("locale", lambda: locale.setlocale(locale.LC_ALL), _put_locale),
    Watch("signal handlers", _signals, _put_signals),
    Watch("timers", _timers, _put_timers),
    Watch(
        "blocked signals",
        lambda: frozenset(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        lambda mask: signal.pthread_sigmask(signal.SIG_SETMASK, mask),
    ),
    Watch("resource limits", _limits, _put_limits),
    Watch(
        "warnings filters",
        lambda: (tuple(warnings.filters), warnings.showwarning, warnings.formatwarning),
        _put_filters,
    ),
    Watch("logging", _logging, _put_logging),
    Watch("interpreter settings", _interpreter, _put_interpreter),
    Watch("sys.path", lambda: tuple(sys.path), _put_path),
    Watch("finders of modules", _finders, _put_finders),
    Watch("loaded modules", _loaded, sys.modules.update, _gone, kept=False),
    Watch("standard streams", _streams, _put_streams),
    Watch("numbers of the judge", _tables, _put_tables),
    Watch("print options", _printing, _put_printing),
    Watch("scheduling", _scheduling, _put_scheduling),
    Watch("python RNG", random.getstate, random.setstate, kept=False),
    Watch("numpy RNG", _numpy_state, _put_numpy, kept=False),
    Watch(
        "numpy error handling",
        lambda: (np.geterr(), np.geterrcall()),
        lambda how: (np.seterr(**how[0]), np.seterrcall(how[1])),
    ),
    Watch("torch RNG", _torch_rng, _put_torch_rng, kept=False),
    Watch("CUDA RNG", _cuda_rng, _put_cuda_rng, kept=False),
    Watch("inference mode", torch.is_inference_mode_enabled, None, kept=False),
    Watch("grad mode", torch.is_grad_enabled, torch.set_grad_enabled),
    Watch(
        "anomaly mode",
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda v: torch.set_anomaly_enabled(*v),
    ),
    Watch("hooks on saved tensors", _saved_hooks, _put_saved_hooks),
    Watch(
        "profiler", torch.autograd._profiler_enabled, lambda on: on or torch.autograd._disable_profiler(), kept=False
    ),
    Watch("torch.set_warn_always", torch.is_warn_always_enabled, torch.set_warn_always),
    Watch("autograd threads", torch._C._is_multithreading_enabled, torch._C._set_multithreading_enabled),
    Watch("default dtype", torch.get_default_dtype, torch.set_default_dtype),
    Watch(
        "default device",
        lambda: str(torch.get_default_device()),
        lambda d: torch.set_default_device(None if d == "cpu" else d),
    ),
    Watch("float32_matmul_precision", matmul_precision, torch.set_float32_matmul_precision),
    Watch(
        "deterministic algorithms", _deterministic, lambda v: torch.use_deterministic_algorithms(v[0], warn_only=v[1])
    ),
    Watch("switches", _switches, _put_switches, _named_switches),
    Watch("autocast", _autocast, _put_autocast),
    Watch("flushing of subnormal numbers", _flushes, torch.set_flush_denormal),
    Watch("number of threads", torch.get_num_threads, torch.set_num_threads),
    Watch("hooks on every module", lambda: tuple(dict(vars(nn_module)[n]) for n in HOOKS), _put_hooks),
    Watch("threads", _threads, None, _more("thread"), kept=False),
    Watch("file descriptors", _descriptors, None, _more("file descriptor"), kept=False),
    Watch("child processes", _children, None, _more("process"), kept=False),
)
"""In the order in which they are put back: modes first that change what later entries do."""


def differing(before: dict[str, Any]) -> Iterator[tuple[Watch, Any]]:
    """Each entry that is not as it was, with what it is now."""
    for watch in WATCHES:
        now = watch.get()
        was = before[watch.name]
        if (
            now is not was and now != was and watch.differences(was, now)
        ):  # a dictionary compares all of itself with itself
            yield watch, now
