"""What names mean: the functions of torch, of the libraries under test and of the harness, where a call may rebind them."""

import contextlib
import dataclasses
import functools
import itertools
import operator
import sys
from collections.abc import Iterator, ValuesView
from types import FunctionType, ModuleType
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
Change = tuple[Any, str, Any, Any]
"""Owner, name, what it was and what it is now; MISSING where there was or is nothing."""
MISSING = object()


@dataclasses.dataclass(frozen=True)
class Names:
    """The bindings of everything that is watched: (name, module or class, what it bound), all their values in order, the views
    that give what these are now, and the functions among them with their code."""

    modules: int
    owners: list[tuple[str, Any, dict[str, Any]]]
    values: list[Any]
    now: list[ValuesView[Any]]
    functions: list[FunctionType]
    code: list[Any]

    def hold(self) -> bool:
        """Whether no value is another now: in C, by identity first."""
        try:
            return self.values == [*itertools.chain.from_iterable(self.now)]
        except Exception:  # values that cannot be compared, arrays for example
            return False

    def changes(self) -> Iterator[tuple[str, Change]]:
        """("torch.log_softmax", change) of what was rebound, removed, or hides what was inherited since these were taken.

        A name that merely appeared, by an import or a cache, is no change; neither is a flag, a counter or compiled code.
        """
        for label, owner, then in () if self.hold() else self.owners:
            now = vars(owner)
            for name, value in then.items():
                if now.get(name, MISSING) is not value and _matters(value, label, name):
                    yield f"{label}.{name}", (owner, name, value, now.get(name, MISSING))
            if isinstance(owner, type):
                for name in now.keys() - then.keys():
                    if any(name in vars(base) for base in owner.__mro__[1:]) and _matters(now[name], label, name):
                        yield f"{label}.{name}", (owner, name, MISSING, now[name])


_last: list[Names] = []
_CODE = operator.attrgetter("__code__")


def take() -> Names:
    """The bindings of everything; those of the last time where nothing was imported and no value is another since."""
    if not _last or _last[0].modules != len(sys.modules) or not _last[0].hold():
        owners = [(name, owner, dict(vars(owner))) for name, owner in _owners(len(sys.modules))]
        values = [v for *_, bound in owners for v in bound.values()]
        functions = [v for v in values if isinstance(v, FunctionType)]
        now = [vars(owner).values() for _, owner, _ in owners]
        _last[:] = [Names(len(sys.modules), owners, values, now, functions, [*map(_CODE, functions)])]
    return _last[0]


def recoded() -> str:
    """A function whose code was exchanged since `take` looked at all; its name still leads to it."""
    if not _last or [*map(_CODE, _last[0].functions)] == _last[0].code:  # in C, by identity first
        return ""
    pairs = zip(_last[0].functions, _last[0].code, strict=True)
    return next((f"{f.__module__}.{f.__qualname__}" for f, before in pairs if f.__code__ is not before), "")


@functools.lru_cache(maxsize=1)
def _owners(modules: int) -> list[tuple[str, Any]]:
    """(name, module or class) of everything that is watched; looked for anew where the number of modules is another."""
    out: list[tuple[str, Any]] = [(name, sys.modules[name]) for name in OPERATIONS if name in sys.modules]
    out += [(f"{c.__module__}.{c.__qualname__}", c) for c in CLASSES]
    for name, module in list(sys.modules.items()):
        if isinstance(module, ModuleType) and name.partition(".")[0] in UNDER_TEST:
            out.append((name, module))
            classes = [c for c in vars(module).values() if isinstance(c, type) and c.__module__ == name]
            out += [(f"{name}.{c.__qualname__}", c) for c in classes]
    return out


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
