"""Loss families: what each computes (the oracle), on which inputs, under which settings.

A family knows no library. Adding one is adding a file here that ends in a `Family`, and its name to `NAMES`.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch

from parity.case import DTYPES, Case
from parity.errors import UsageError
from parity.rounding import Mark

NAMES = ("logprobs", "policy", "divergence")


@dataclasses.dataclass(frozen=True)
class Setting:
    """One dimension of a family: its default, what it means, and the values it may take (None: see `doc`)."""

    default: Any
    doc: str
    choices: tuple[Any, ...] | None = None


def defaults(settings: Mapping[str, Setting]) -> dict[str, Any]:
    """Name -> default of every setting."""
    return {name: setting.default for name, setting in settings.items()}


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The tensors of a case, given alike to oracle, reference and candidate.

    Attributes:
        case: the case they came from.
        settings: every setting of the family, defaults filled in, as attributes.
        tensors: by name; `inputs.hidden` is `inputs.tensors["hidden"]`. Absent optional tensors are None.
        leaves: the names of the tensors whose gradient is asked for.
        cotangents: output quantity -> upstream gradient, same shape as the output.
        undecided: tokens masked out because rounding alone decides on which side of a threshold they fall.
    """

    case: Case
    settings: SimpleNamespace
    tensors: Mapping[str, torch.Tensor | None]
    leaves: tuple[str, ...]
    cotangents: Mapping[str, torch.Tensor]
    undecided: int = 0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "tensors":
            raise AttributeError(name)
        try:
            return self.tensors[name]
        except KeyError:
            raise AttributeError(
                f"case {self.case.id} has no tensor {name!r}; it has {', '.join(self.tensors)}"
            ) from None

    def replace(self, **tensors: torch.Tensor | None) -> Inputs:
        """The same inputs with some tensors exchanged."""
        return dataclasses.replace(self, tensors={**self.tensors, **tensors})

    @property
    def dtype(self) -> torch.dtype:
        """The torch dtype of the case."""
        return DTYPES[self.case.dtype]


Oracle = Callable[[Inputs, Mark], dict[str, torch.Tensor]]


@dataclasses.dataclass(frozen=True)
class Family:
    """A loss family.

    Attributes:
        name: as in cases and on the command line.
        settings: every dimension with its default; shapes included.
        draw: `draw(draw, strategies, dtype, profile, contexts) -> settings`, drawn with Hypothesis.
        contexts: call contexts that make sense for the family.
        build: case -> `Inputs` on the CPU, in the dtypes under test.
        oracle: the definition, float64, plain torch, on inputs that may carry a leading replica dimension in every
            leaf. Returns the outputs; names with a leading underscore are internal: `_logps` (per-token log-probs) and
            `_terms` (what the loss sums) sharpen the gate of a scalar.
        outputs: output quantities in order; an implementation may leave out those in `optional`.
        scalars: the outputs judged by the scalar gate.
        exact: the outputs that must match to the last bit of float32 (counts, clip fractions).
        zeros: inputs -> quantity -> boolean mask of rows that the loss mask makes exactly zero.
        features: case -> the facts that coverage counts and that ledger scopes can name, besides settings.
        variants: name -> an oracle that follows another definition (an older release's, say), tried where a party disagrees.
        demands: inputs -> names of the settings and tensors that a function must have parameters for to handle them.
        required: parameter names by which a user's function is recognised as belonging to the family.
        relations: name -> `Relation`, the exact relations.
    """

    name: str
    settings: Mapping[str, Setting]
    draw: Callable[..., dict[str, Any]]
    build: Callable[[Case], Inputs]
    oracle: Oracle
    outputs: tuple[str, ...]
    contexts: tuple[str, ...] = ("plain", "checkpoint", "compile")
    optional: frozenset[str] = frozenset()
    scalars: frozenset[str] = frozenset()
    exact: frozenset[str] = frozenset()
    zeros: Callable[[Inputs], dict[str, torch.Tensor]] = lambda inputs: {}
    features: Callable[[Case], dict[str, Any]] = lambda case: {}
    variants: Mapping[str, Oracle] = dataclasses.field(default_factory=dict)
    demands: Callable[[Inputs], set[str]] = lambda inputs: set()
    required: tuple[str, ...] = ()
    relations: Mapping[str, Relation] = dataclasses.field(default_factory=dict)

    def full_settings(self, case: Case) -> SimpleNamespace:
        """Every setting of `case`, defaults filled in.

        Raises:
            UsageError: for a setting that the family does not have, or a value outside its choices.
        """
        for name, value in case.settings.items():
            if name not in self.settings:
                raise UsageError(
                    f"case {case.id}: setting {name!r} is unknown to family {self.name}, it has {', '.join(self.settings)}"
                )
            choices = self.settings[name].choices
            if choices is not None and value not in choices:
                raise UsageError(f"case {case.id}: {name}={value!r} is not among {', '.join(map(repr, choices))}")
            default = self.settings[name].default
            if choices is None and not fits(value, default):
                kind = "an integer" if type(default) is int else "text" if isinstance(default, str) else "a number"
                raise UsageError(f"case {case.id}: {name}={value!r} must be {kind}")
        return SimpleNamespace(**{n: case.settings.get(n, s.default) for n, s in self.settings.items()})

    def case(self, seed: int, dtype: str, settings: Mapping[str, Any]) -> Case:
        """A case from drawn settings; values that equal the default are dropped, so that equal cases have equal ids."""
        kept = {
            k: v
            for k, v in settings.items()
            if v != self.settings[k].default or type(v) is not type(self.settings[k].default)
        }
        return Case(self.name, seed, dtype, kept)


@dataclasses.dataclass(frozen=True)
class Relation:
    """An exact relation: what a change of inputs must do to every quantity.

    Attributes:
        change: inputs -> changed inputs, or None where the relation does not apply to the case.
        factor: quantity -> power-of-two factor that the change applies to it (missing: 1).
        why: one line, for the report.
    """

    change: Callable[[Inputs], Inputs | None]
    factor: Mapping[str, float]
    why: str


def fits(value: Any, default: Any) -> bool:
    """Whether a setting's value is of its default's kind; None stands for a number or a list that may be absent."""
    if isinstance(value, bool):
        return isinstance(default, bool)
    if default is None:
        return value is None or isinstance(value, int | float | list)
    return isinstance(value, int | float) if type(default) is float else isinstance(value, type(default))


def family(name: str) -> Family:
    """The family called `name`; a trainer's name gives what stands for a family there.

    Raises:
        UsageError: naming the families that exist.
    """
    from parity import trainers

    if trainers.is_trainer(name):
        return trainers.family(name)  # type: ignore[return-value]
    if name not in NAMES:
        known = (*NAMES, *trainers.TRAINERS)
        raise UsageError(f"family {name!r} is unknown, choose from {', '.join(known)}")
    return importlib.import_module(f"parity.families.{name}").FAMILY
