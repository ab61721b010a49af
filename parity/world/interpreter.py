"""What a process has of Python: hooks, modules, logging, warnings."""

import faulthandler
import gc
import logging
import random
import sys
import threading
import warnings
from typing import Any

from parity.world.bindings import VERSIONED, version
from parity.world.watch import Watch


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


TABLES = (("parity.judge.recipe", "DTYPES UNIT_ROUNDOFF HALF_SUBNORMAL LARGEST"),)
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


def _logging_changes(before: tuple[Any, ...], now: tuple[Any, ...]) -> list[str]:
    parts = ("level", "disabled", "propagate", "handlers")
    out = ["logging changed"] if before[:2] != now[:2] else []
    for (logger, *was), (_, *found) in zip(before[2:], now[2:], strict=True):
        changed = [part for part, a, b in zip(parts, was, found, strict=True) if a != b]
        out += [f"logging changed: {logger.name} ({', '.join(changed)})"] if changed else []
    return out


def _put_logging(value: tuple[Any, ...]) -> None:
    disable, kind, *loggers = value
    logging.disable(disable)
    logging.setLoggerClass(kind)
    for one, level, one.disabled, one.propagate, handlers in loggers:
        one.setLevel(level)
        one.handlers[:] = handlers


def _put_path(value: tuple[str, ...]) -> None:
    sys.path[:] = value


def _put_filters(value: tuple[Any, ...]) -> None:
    warnings.resetwarnings()
    warnings.filters[:] = list(value[0])  # type: ignore[index]
    warnings.showwarning, warnings.formatwarning = value[1:]


WATCHES: tuple[Watch, ...] = (
    Watch(
        "warnings filters",
        lambda: (tuple(warnings.filters), warnings.showwarning, warnings.formatwarning),
        _put_filters,
    ),
    Watch("logging", _logging, _put_logging, _logging_changes),
    Watch("interpreter settings", _interpreter, _put_interpreter),
    Watch("sys.path", lambda: tuple(sys.path), _put_path),
    Watch("finders of modules", _finders, _put_finders),
    Watch("loaded modules", _loaded, sys.modules.update, _gone, kept=False),
    Watch("numbers of the judge", _tables, _put_tables),
    Watch("python RNG", random.getstate, random.setstate, kept=False),
)
