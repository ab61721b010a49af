"""A loss family as a record: its settings, how its cases are drawn and built, and the definition of its outputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, Protocol

import torch

from parity.case.case import Case
from parity.case.inputs import Inputs, Setting, fits
from parity.errors import UsageError


class Mark(Protocol):
    """What an oracle calls where a recipe may store or round; see `recipe_mark`."""

    def __call__(
        self,
        name: str,
        x: torch.Tensor,
        size: Callable[[], torch.Tensor] | None = None,
        along: Callable[[], torch.Tensor] | None = None,
    ) -> torch.Tensor: ...


Oracle = Callable[[Inputs, Mark], dict[str, torch.Tensor]]


class AnyFamily(Protocol):
    """What cases, rows, ledger and reports ask of a loss family and of a trainer alike."""

    @property
    def name(self) -> str: ...
    @property
    def settings(self) -> Mapping[str, Setting]: ...
    def full_settings(self, case: Case) -> SimpleNamespace: ...
    def case(self, seed: int, dtype: str, settings: Mapping[str, Any]) -> Case: ...
    def features(self, case: Case) -> Mapping[str, Any]: ...


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
