"""What names mean: the functions of torch, of the libraries under test and of the harness, where a call may rebind them."""

import contextlib
import itertools
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch

OPERATIONS = (
    "builtins math torch torch.functional torch.nn torch.nn.functional torch.nn.init torch.autograd torch.autograd.function "
    "torch.special torch.linalg torch.fft torch.amp torch.cuda torch.random torch.utils.checkpoint torch._tensor "
    "torch._C._nn torch._C._special torch._C._linalg torch._VF torch.optim torch.overrides "
    "numpy os io json time random copy zlib hashlib inspect traceback tempfile"
).split()
"""Modules whose functions oracle, replicas and every implementation are written in, and the harness around them."""
UNDER_TEST = frozenset("parity trl liger_kernel cut_cross_entropy unsloth_zoo".split())
"""Packages of which every imported module is watched, and every class in it: a patch of TRL is not for the next party."""
CLASSES = (torch.Tensor, torch.nn.Module, torch.nn.Linear, torch.nn.Parameter, torch.autograd.Function, torch.Generator)
COMPILED = ("__compiled_fn_", "__resume_at_")
"""How the names begin under which `torch.compile` keeps code in a module's globals, until `torch.compiler.reset`."""
Names = list[tuple[str, Any, dict[str, Any]]]
"""(name, owner, its bindings) of everything that is watched."""
Change = tuple[Any, str, Any, Any]
"""Owner, name, what it was and what it is now; MISSING where there was or is nothing."""
MISSING = object()

_owners: list[tuple[str, Any]] = []
_views: list[Any] = []
"""The values of each owner, as they are at any time."""
_last: list[tuple[list[Any], Names]] = []
"""All values when they were last looked at, and the bindings then; nothing after an import."""
_modules: list[int] = []
"""How many modules there were when owners were last looked for."""


def owners() -> list[tuple[str, Any]]:
    """(name, module or class) of everything that is watched; looked for anew after an import."""
    if _modules == [len(sys.modules)]:
        return _owners
    _modules[:] = [len(sys.modules)]
    _last.clear()
    _owners[:] = [(name, sys.modules[name]) for name in OPERATIONS if name in sys.modules]
    _owners.extend((f"{c.__module__}.{c.__qualname__}", c) for c in CLASSES)
    for name, module in list(sys.modules.items()):
        if isinstance(module, ModuleType) and name.partition(".")[0] in UNDER_TEST:
            _owners.append((name, module))
            classes = [c for c in vars(module).values() if isinstance(c, type) and c.__module__ == name]
            _owners.extend((f"{name}.{c.__qualname__}", c) for c in classes)
    _views[:] = [vars(owner).values() for _, owner in _owners]
    return _owners


def take() -> Names:
    """The bindings of everything; those of the last time where no value is another since."""
    found, values = owners(), [*itertools.chain.from_iterable(_views)]
    if not _unchanged(values):
        _last[:] = [(values, [(name, owner, dict(vars(owner))) for name, owner in found])]
    return _last[0][1]


def _unchanged(values: list[Any]) -> bool:
    try:
        return bool(_last) and values == _last[0][0]  # in C, by identity first
    except Exception:  # values that cannot be compared, arrays for example
        return False


def changes(before: Names) -> Iterator[tuple[str, Change]]:
    """("torch.log_softmax", change) of what was rebound, removed, or hides what was inherited since `before` was taken.

    A name that merely appeared, by an import or a cache, is no change; neither is a flag, a counter or compiled code.
    """
    if _last and before is _last[0][1] and _unchanged([*itertools.chain.from_iterable(_views)]):
        return
    for label, owner, then in before:
        now = vars(owner)
        for name, value in then.items():
            if now.get(name, MISSING) is not value and _matters(value, label, name):
                yield f"{label}.{name}", (owner, name, value, now.get(name, MISSING))
        if isinstance(owner, type):
            for name in now.keys() - then.keys():
                if any(name in vars(base) for base in owner.__mro__[1:]) and _matters(now[name], label, name):
                    yield f"{label}.{name}", (owner, name, MISSING, now[name])


def _matters(value: Any, label: str, name: str) -> bool:
    if name.startswith(COMPILED):
        return False
    constant = isinstance(value, float) and label in ("torch", "math")
    constant |= name.isupper() and label.startswith("parity.")
    return constant or callable(value) or isinstance(value, torch.dtype | property | staticmethod | classmethod)


def put(owner: Any, name: str, value: Any) -> None:
    """Bind a name of an owner, or unbind it."""
    with contextlib.suppress(AttributeError):
        delattr(owner, name) if value is MISSING else setattr(owner, name, value)
