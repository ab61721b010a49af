"""What an adapter does as lines of a script: torch's calls as they come, and each call of the library as one line."""

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, resolve_name

from parity.errors import Unsupported
from parity.implementations import implementation
from parity.tools.issue.tensors import literal

PLAIN = (bool, int, float, str, type(None), torch.dtype)


class Recorder(TorchFunctionMode):
    """While it is entered, `lines` grow; `imports` has what they need, `called` how often the library was called."""

    def __init__(self, tensors: Mapping[str, torch.Tensor | None]):
        super().__init__()
        self.names = {id(t): name for name, t in tensors.items() if t is not None}
        self._kept: list[Any] = list(tensors.values())  # an id is of one tensor only while that lives
        self.lines: list[str] = []
        self.imports: set[str] = set()
        self.called = 0
        self._inside = False

    def __enter__(self) -> Any:
        implementation.LOOKED_UP.append(self.library)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        implementation.LOOKED_UP.remove(self.library)
        super().__exit__(*error)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """A call of torch's: a line, unless the library makes it or it gives back what it was given."""
        out = func(*args, **(kwargs or {}))
        known = id(out) in self.names and not getattr(func, "__name__", "").endswith("_")
        if not (self._inside or known) and (func is torch.Tensor.__setitem__ or any(_tensors(out))):
            self._assigned(self._torch(func, args, kwargs or {}), out)
        return out

    def library(self, module: Any, name: str, found: Any) -> Any:
        """`module.name`, whose calls are lines."""
        inner = isinstance(module, type)
        top = module.__name__ if inner else name
        place = str(module.__module__ if inner else module.__name__).removeprefix("parity_user_")
        self.imports.add(f"from {place} import {top}")
        return Watched(self, found, f"{top}.{name}" if inner else name)

    def call(self, found: Callable[..., Any], text: str, args: Any, kwargs: Any) -> Any:
        """A call of the library; what it returns is watched too where it is no tensor."""
        line = f"{text}({self._arguments(args, kwargs)})"
        before, self._inside = self._inside, True
        try:
            out = found(*map(_bare, args), **{n: _bare(v) for n, v in kwargs.items()})
        finally:
            self._inside = before
        self.called += any(_tensors(out))
        name = self._assigned(line, out)
        return out if any(_tensors(out)) else Watched(self, out, name)

    def _assigned(self, line: str, out: Any) -> str:
        name = f"v{len(self.lines)}"
        self.lines.append(f"{name} = {line}")
        self._named(out, name)
        return name

    def _named(self, out: Any, name: str) -> None:
        self._kept.append(out)
        if isinstance(out, torch.Tensor):
            self.names[id(out)] = name
        for key, part in (
            out.items() if isinstance(out, dict) else enumerate(out if isinstance(out, tuple | list) else ())
        ):
            self._named(part, f"{name}[{key!r}]")

    def _torch(self, func: Any, args: Any, kwargs: Any) -> str:
        name = resolve_name(func) or ""
        if name.endswith(".__get__"):
            return f"{self.text(args[0])}.{name.split('.')[-2]}"
        if name.startswith("torch.Tensor."):
            return f"{self.text(args[0])}.{name.rpartition('.')[2]}({self._arguments(args[1:], kwargs)})"
        if not name:
            raise Unsupported(f"the adapter calls {func}, which has no name")
        return f"{name}({self._arguments(args, kwargs)})"

    def _arguments(self, args: Iterable[Any], kwargs: Mapping[str, Any]) -> str:
        return ", ".join([*map(self.text, args), *(f"{n}={self.text(v)}" for n, v in kwargs.items())])

    def text(self, value: Any) -> str:
        """The value as source.

        Raises:
            Unsupported: for an object that no line makes.
        """
        if isinstance(value, torch.Tensor):
            if id(value) not in self.names and value.requires_grad:
                raise Unsupported("the library is given a tensor with a history that no line of the script makes")
            return self.names.get(id(value)) or literal(value.detach())
        if isinstance(value, Watched):
            return value._text
        if isinstance(value, tuple | list):
            inner = "".join(f"{self.text(part)}, " for part in value)
            return f"[{inner[:-2]}]" if isinstance(value, list) else f"({inner.rstrip()})"
        if isinstance(value, slice):
            return f"slice({value.start}, {value.stop}, {value.step})"
        if isinstance(value, float) and not math.isfinite(value):
            return f"float('{value}')"
        if isinstance(value, PLAIN) or value is Ellipsis:
            return repr(value)
        if isinstance(value, torch.device):
            return repr(value.type)
        raise Unsupported(f"the library is given a {type(value).__name__}, which no line of a script makes")


class Watched:
    """Something of a library whose calls, and those of its attributes, are recorded."""

    def __init__(self, recorder: Recorder, what: Any, text: str):
        self._recorder, self._what, self._text = recorder, what, text

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._recorder.call(self._what, self._text, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._what, name)
        return Watched(self._recorder, found, f"{self._text}.{name}") if callable(found) else found

    @property
    def __signature__(self) -> Any:
        return inspect.signature(self._what)


def _bare(value: Any) -> Any:
    return value._what if isinstance(value, Watched) else value


def _tensors(out: Any) -> list[bool]:
    """A truth for each tensor among what a call returned."""
    parts = out if isinstance(out, tuple | list) else out.values() if isinstance(out, dict) else (out,)
    return [True for part in parts if isinstance(part, torch.Tensor)]
