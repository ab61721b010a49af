"""Settings of a family, and the tensors of a case: the same for oracle, reference and candidate."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Literal

import torch

from parity.case.case import Case
from parity.decoding import shown
from parity.errors import UsageError
from parity.judge.recipe import DTYPES


@dataclasses.dataclass(frozen=True)
class Setting:
    """One dimension of a family."""

    default: Any  # its value where a case names none
    doc: str  # what it means
    choices: tuple[Any, ...] | None = None  # the values it may take; None: see `doc`
    within: str = ""  # the interval that its numbers lie in, "[0, 1)"; empty: any
    # of a size, which part it has of the largest tensor that a loss holds: its "rows", the "length" of a row, or neither
    # ("inner")
    size: Literal["", "rows", "length", "inner"] = ""
    # values that a drawn case has, where the family has no `draw`; None: its choices, or else its default
    drawn: Sequence[Any] | None = None
    # values of what few functions take, which one case in many has, see `parity.case.drawing`; an implementation that does
    # not say so (`Implementation.takes`) refuses others than the default
    few: Sequence[Any] = ()


def defaults(settings: Mapping[str, Setting]) -> dict[str, Any]:
    return {name: setting.default for name, setting in settings.items()}


def fits(value: Any, default: Any) -> bool:
    """Whether a setting's value is of its default's kind; None means a number or a list that may be absent."""
    if isinstance(value, bool):
        return isinstance(default, bool)
    if default is None:
        return value is None or isinstance(value, int | float | list)
    return isinstance(value, int | float) if type(default) is float else isinstance(value, type(default))


def _inside(value: Any, interval: str) -> bool:
    low, high = map(float, interval[1:-1].split(","))
    ends = (value == low and interval[0] == "[") or (value == high and interval[-1] == "]")
    return ends or (isinstance(value, int | float) and low < value < high)


def filled(case: Case, table: Mapping[str, Setting], of: str) -> SimpleNamespace:
    """The settings of a case, with the defaults of those that it leaves out; `of`: whose table it is. Raises UsageError
    for a setting that is not in the table, or a value outside its choices."""
    for name, value in case.settings.items():
        if name not in table:
            raise UsageError(f"case {case.id}: setting {name!r} is unknown to {of}, it has {', '.join(table)}")
        choices, default = table[name].choices, table[name].default
        if choices is not None and value not in choices:
            raise UsageError(f"case {case.id}: {name}={shown(value)} is not among {', '.join(map(repr, choices))}")
        if choices is None and not fits(value, default):
            kind = "an integer" if type(default) is int else "text" if isinstance(default, str) else "a number"
            raise UsageError(f"case {case.id}: {name}={shown(value)} must be {kind}")
        if table[name].within and value is not None and not _inside(value, table[name].within):
            raise UsageError(f"case {case.id}: {name}={shown(value)} must lie in {table[name].within}")
    return SimpleNamespace(**{**defaults(table), **case.settings})


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The tensors of a case, given alike to oracle, reference and candidate."""

    case: Case  # the case they came from
    settings: SimpleNamespace  # every setting of the family, defaults filled in, as attributes
    # by name; `inputs.hidden` is `inputs.tensors["hidden"]`. Absent optional tensors are None.
    tensors: Mapping[str, torch.Tensor | None]
    leaves: tuple[str, ...]  # the names of the tensors whose gradient is asked for
    cotangents: Mapping[str, torch.Tensor]  # output quantity -> upstream gradient, same shape as the output
    undecided: int = 0  # tokens masked out because rounding alone decides on which side of a threshold they fall
    # tensors that are parameters of a model in real use, and so `nn.Parameter` where they are called
    parameters: frozenset[str] = frozenset({"weight", "bias", "lora_a", "lora_b"})
    # tensor -> another with the same bits, which is handed over in its place: a teacher's head that is the student's, so
    # that a gradient into the teacher would reach it
    shared: Mapping[str, str] = dataclasses.field(default_factory=dict)
    # those of which every replica has its own, rounded by itself; None: every one of floating point
    replicated: frozenset[str] | None = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "tensors":
            raise AttributeError(name)
        if name not in self.tensors:
            raise AttributeError(f"case {self.case.id} has no tensor {name!r}; it has {', '.join(self.tensors)}")
        return self.tensors[name]

    def replace(self, **tensors: torch.Tensor | None) -> Inputs:
        return dataclasses.replace(self, tensors={**self.tensors, **tensors})

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.case.dtype]

    @property
    def device(self) -> torch.device:
        return next((t.device for t in self.tensors.values() if t is not None), torch.device("cpu"))

    @property
    def context(self) -> str:
        """How the implementation is called; "plain" in a family without such a setting."""
        return context_of(self.settings)

    @property
    def autocast(self) -> str | None:
        """The dtype that products have under autocast, None outside it."""
        return autocast_of(self.settings)

    @property
    def product_dtype(self) -> str:
        """The dtype of products: autocast's or that of the inputs."""
        return product_dtype(self.case, self.settings)


def context_of(settings: SimpleNamespace) -> str:
    """The call context among settings; "plain" where there is no such setting."""
    return str(getattr(settings, "context", "plain"))


def autocast_of(settings: SimpleNamespace) -> str | None:
    """The dtype of autocast among settings, None outside it."""
    return {"autocast": "bf16", "autocast_fp16": "fp16"}.get(context_of(settings))


def product_dtype(case: Case, settings: SimpleNamespace) -> str:
    """The dtype of products: autocast's or that of the inputs."""
    return autocast_of(settings) or case.dtype
