"""The stand-alone script that shows a finding: torch and the library, nothing of this package.

It holds the tensors of the case, the call of the library as the adapter makes it (`Recorder`), and the float64 definition:
each quantity as its numbers or, beyond `WHOLE` of them, as products with random vectors. It exits with 1 while the library is
wrong, with 0 once it is right.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, resolve_name

from parity.case.case import Case
from parity.errors import Unsupported
from parity.implementations import implementation
from parity.implementations.implementation import Implementation
from parity.protocol.call import differentiated, fresh
from parity.registry import oracle_of
from parity.results.row import Row

STRUCTURAL = 0.1
"""Relative distance from which a quantity counts as wrong that was NaN, infinite or missing."""
WHOLE = 64
LONGEST = 60_000
"""Characters of a script; an issue takes 65,536."""
SKETCHED = f"""\
def sketch(tensor):  # the numbers of a small tensor, 16 random products of a large one
    flat = tensor.detach().cpu().double().flatten()
    if flat.numel() <= {WHOLE}:
        return flat
    generator = torch.Generator("cpu").manual_seed(0)
    return torch.randn(16, flat.numel(), generator=generator, dtype=torch.float64, device="cpu") @ flat / 4
"""
COMPARED = """\
wrong = []
print("| quantity | library | float64 definition | relative distance |")
print("|---|---|---|---|")
for name, (size, numbers) in EXACT.items():
    value, right = found[name], torch.tensor(numbers, dtype=torch.float64, device="cpu")
    off = float("nan") if value is None else float((sketch(value) - right).norm() / right.norm().clamp(min=1e-300))
    shown = "none" if value is None else f"{float(value if value.dim() == 0 else value.double().norm()):.6g}"
    print(f"| {name} | {shown} | {size:.6g} | {off:.2g} |")
    if name in LIMITS and not off <= LIMITS[name]:
        wrong.append(name)
print("wrong:" if wrong else "right", *wrong)
raise SystemExit(1 if wrong else 0)
"""


def limits_of(rows: Sequence[Row]) -> dict[str, float]:
    """Quantity -> where the script draws the line: half way, on a logarithmic scale, from what rounding allows to the error."""
    out: dict[str, float] = {}
    for row in rows:
        if row.verdict not in ("disagree", "nondeterministic") or row.gate in ("protocol", "relation", None):
            continue
        limit = STRUCTURAL
        if row.headroom and row.dist and row.value_oracle:
            limit = float(row.dist / abs(row.value_oracle) / row.headroom**0.5)
        out[str(row.quantity)] = limit
    return out


def script(case: Case, implementation: Implementation, limits: Mapping[str, float], device: str = "cpu") -> str:
    """The script of a finding; `limits` as `limits_of` gives them.

    Raises:
        Unsupported: where no script can stand alone, with the reason.
    """
    if implementation.around is not contextlib.nullcontext:
        raise Unsupported("the harness changes the library's process around the call")
    whole = oracle_of(case).offered(implementation)
    x = fresh(whole.inputs)
    if x.context not in ("plain", "autocast"):
        raise Unsupported(f"the call is made under {x.context}")
    tensors = {name: tensor for name, tensor in x.tensors.items() if tensor is not None}
    autocast = torch.autocast(x.device.type, torch.bfloat16, enabled=x.context == "autocast")
    with autocast, Recorder(tensors) as seen:
        outputs = implementation.call(x)
    found = {name: seen.text(value) for name, value in outputs.items() if name in whole.exact}
    given = {name: found[name] for name in differentiated(x, outputs)}
    if not seen.called:
        raise Unsupported("the adapter calls no function of a library by name")
    body = "\n".join([*seen.lines, *found.values()])
    used = [name for name in tensors if name in x.leaves or name in body]
    lines = [line for name in used for line in assigned(name, tensors[name].detach())]
    for name in used:
        if name in x.parameters:
            lines.append(f"{name} = torch.nn.Parameter({name}, {name in x.leaves})")
        elif name in x.leaves:
            lines.append(f"{name}.requires_grad_()")
    for name in given:
        lines += assigned(f"cotangent_{name}", x.cotangents[name])
    inner = [part for line in seen.lines for part in wrapped(line)]
    if x.context == "autocast":
        inner = ["with torch.autocast(hidden.device.type, torch.bfloat16):", *(f"    {line}" for line in inner)]
    lines += ["", *inner, ""]
    if given and x.leaves:
        upstream = ", ".join(f"cotangent_{name}.to({text})" for name, text in given.items())
        lines += wrapped(f"torch.autograd.backward([{', '.join(given.values())}], [{upstream}])")
        found |= {f"grad_{name}": f"{name}.grad" for name in x.leaves}
    exact = {name: value for name, value in whole.exact.items() if name in found and value.isfinite().all()}
    lines += wrapped(f"found = {{{', '.join(f'{name!r}: {text}' for name, text in found.items())}}}")
    lines += ["EXACT = {", *(part for name, value in exact.items() for part in _told(name, value)), "}"]
    kept = ", ".join(f"{name!r}: {value:.2g}" for name, value in limits.items() if name in exact)
    lines += [f"LIMITS = {{{kept}}}  # a relative distance beyond is no rounding", "", ""]
    lines += [*SKETCHED.splitlines(), "", "", *COMPARED.splitlines()]
    head = f"# {implementation.library or implementation.id} {implementation.version() or ''}".rstrip()
    out = "\n".join([head, *_imports(seen, implementation, device, "\n".join(lines)), "", *lines]) + "\n"
    if len(out) > LONGEST:
        raise Unsupported(f"its tensors make a script of {len(out):,} characters")
    return out


def _told(name: str, value: torch.Tensor) -> list[str]:
    size = float(value) if value.dim() == 0 else float(value.double().norm())
    space: dict[str, object] = {"torch": torch}
    exec(SKETCHED, space)
    numbers = ", ".join(f"{v:.10g}" for v in space["sketch"](value).tolist())  # type: ignore[operator]
    return wrapped(f"    {name!r}: ({size:.10g}, [{numbers}]),")


def _imports(seen: Recorder, implementation: Implementation, device: str, text: str) -> list[str]:
    out = ["import torch", *sorted(seen.imports), "", "torch.set_num_threads(1)"]
    if " inf" in text or "-inf" in text or " nan" in text:
        out.insert(0, "from math import inf, nan")
    if implementation.library == "trl":
        out = ["import os", "", "os.environ['HF_HUB_OFFLINE'] = '1'", *out]
    if implementation.interpreted:
        switch = '    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported'
        out = ["import os", "import torch", "", "if not torch.cuda.is_available():", switch, *out]
    if device != "cpu":
        out.append('torch.set_default_device("cuda" if torch.cuda.is_available() else "cpu")')
    return out


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


WIDTH = 120


def wrapped(line: str) -> list[str]:
    """A line of code of at most 120 columns, broken at spaces inside its brackets."""
    if len(line) <= WIDTH:
        return [line]
    indent = " " * (len(line) - len(line.lstrip()) + 4)
    return textwrap.wrap(line, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def assigned(name: str, tensor: torch.Tensor) -> list[str]:
    """Lines that give `name` the tensor's bits and strides."""
    lines = wrapped(f"{name} = {literal(tensor)}")
    shape, strides, offset = tuple(tensor.shape), tensor.stride(), tensor.storage_offset()
    if (offset or not tensor.is_contiguous()) and tensor.numel():
        span = offset + 1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
        index = ", ".join(":1" if step == 0 else ":" for step in strides)
        sizes = tuple(1 if step == 0 else n for n, step in zip(shape, strides, strict=True))
        memory = f"torch.zeros({span}, dtype={tensor.dtype}).as_strided({sizes}, {strides}, {offset})"
        lines += wrapped(f"{name} = {memory}.copy_({name}[{index or '...'}]).expand({shape})")
    return lines


def literal(tensor: torch.Tensor) -> str:
    """An expression that makes the tensor's values."""
    values = [number(v, tensor.dtype) for v in tensor.flatten().tolist()]
    if len(set(values)) == 1 < len(values):
        return f"torch.full({tuple(tensor.shape)}, {values[0]}, dtype={tensor.dtype})"
    if not tensor.dim():
        return f"torch.tensor({values[0]}, dtype={tensor.dtype})"
    view = "" if tensor.dim() == 1 else f".view({', '.join(map(str, tensor.shape))})"
    return f"torch.tensor([{', '.join(values)}], dtype={tensor.dtype}){view}"


def number(value: float, dtype: torch.dtype) -> str:
    """The shortest decimal that `dtype` rounds to `value`."""
    if not dtype.is_floating_point or not math.isfinite(value):
        return str(value)
    if value == 0:
        return "-0.0" if math.copysign(1.0, value) < 0 else "0"
    for digits in range(1, 17):
        text = f"{value:.{digits}g}"
        if torch.tensor(float(text), dtype=dtype).item() == value:
            return text
    return repr(value)
