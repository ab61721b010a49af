"""A loss family as a record: its definition, its inputs, its settings, and what its quantities are."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, Literal, Protocol

import torch

from parity.case.case import Case
from parity.case.inputs import Inputs, Setting, defaults, filled
from parity.decoding import shown
from parity.errors import UsageError

LARGEST_SIZE, LARGEST_CASE = 1 << 24, 1 << 28
"""Of one dimension, and entries of the logits or of a head: 2 GiB in the float64 of the oracle."""
Oracle = Callable[[Inputs], dict[str, torch.Tensor]]
Kind = Literal["required", "optional", "counted"]
"""Of an output: whether an implementation may leave it out; "counted" ones (counts, clip fractions) are optional and must
match to the last bit of float32."""
CALLING = ("context", "cotangent", "grad", "layout", "layouts")
"""Settings of how a loss is called, for which no function has a parameter."""


class AnyFamily(Protocol):
    """What cases, rows, ledger and reports ask of a loss family and of a trainer alike."""

    @property
    def name(self) -> str: ...
    @property
    def settings(self) -> Mapping[str, Setting]: ...
    @property
    def shapes(self) -> tuple[str, ...]: ...
    def full_settings(self, case: Case) -> SimpleNamespace: ...
    def case(self, seed: int, dtype: str, settings: Mapping[str, Any]) -> Case: ...
    def features(self, case: Case) -> Mapping[str, Any]: ...


@dataclasses.dataclass(frozen=True)
class Family:
    """A loss family: a definition, its inputs, its settings, and what its quantities are. What has a default works with it."""

    name: str  # as in cases and on the command line
    settings: Mapping[str, Setting]  # every dimension with its default; sizes included
    # case -> `Inputs` on the CPU, in the dtypes under test. Tensors may have any names.
    build: Callable[[Case], Inputs]
    # the definition, float64, plain torch, on inputs that may carry a leading replica dimension in every leaf. Returns the
    # outputs; names with a leading underscore are internal: `_logps` (per-token log-probs) and `_terms` (what the loss
    # sums) sharpen the gate of a scalar.
    oracle: Oracle
    outputs: Mapping[str, Kind]  # output quantities in order, with their `Kind`
    # inputs -> quantity -> boolean mask of rows that the loss mask makes exactly zero
    zeros: Callable[[Inputs], dict[str, torch.Tensor]] = lambda inputs: {}
    # name -> `Relation`, the exact relations
    relations: Mapping[str, Relation] = dataclasses.field(default_factory=dict)
    # name -> another definition, such as an older release's, that may explain a disagreement
    variants: Mapping[str, Oracle] = dataclasses.field(default_factory=dict)
    # case -> the facts that coverage counts and that ledger scopes can name, besides settings
    features: Callable[[Case], dict[str, Any]] = lambda case: {}
    # inputs -> names of the settings and tensors that a function must have parameters for to handle them. None: all, but
    # how it is called.
    parameters: Callable[[Inputs], set[str]] | None = None
    # `draw(draw, strategies, dtype, profile, contexts) -> settings`, drawn with Hypothesis. None: each setting by itself,
    # from `Setting.drawn`.
    draw: Callable[..., dict[str, Any]] | None = None
    # (dtype, every setting) -> the same with those at their defaults that have no meaning beside others; `draw` ends with
    # it, and two settings that it does not leave together are no pair that a run owes
    canonical: Callable[[str, dict[str, Any]], dict[str, Any]] = lambda dtype, settings: settings
    # tensors that a case may store -> their dimensions, a letter each ("BTH", "BT|B1" where there are two ways); what
    # `build` then makes of `case.tensors`. Empty: cases of the family store none.
    stored: Mapping[str, str] = dataclasses.field(default_factory=dict)
    # (stored tensors, file) -> the settings that they decide
    derived: Callable[[Mapping[str, torch.Tensor], str], dict[str, Any]] = lambda tensors, where: {}

    @property
    def first(self) -> str:
        """The output that comes first: the loss, or the log-probs."""
        return next(iter(self.outputs))

    @functools.cached_property
    def shapes(self) -> tuple[str, ...]:
        """The settings that are sizes; rows show them always."""
        return tuple(name for name, setting in self.settings.items() if setting.size)

    @functools.cached_property
    def defaults(self) -> Mapping[str, Any]:
        """Every setting's default."""
        return defaults(self.settings)

    @functools.cached_property
    def optional(self) -> frozenset[str]:
        """The outputs that an implementation may leave out."""
        return frozenset(name for name, kind in self.outputs.items() if kind != "required")

    def needed(self, inputs: Inputs) -> set[str]:
        """The names that a function must have parameters for on these inputs, see `parameters`."""
        if self.parameters is not None:
            return self.parameters(inputs)
        settings = self.settings.keys() - {*self.shapes, *CALLING}
        return settings | {name for name, tensor in inputs.tensors.items() if tensor is not None}

    def full_settings(self, case: Case) -> SimpleNamespace:
        """Every setting of `case`, defaults filled in. Raises UsageError for a setting that the family does not have, or
        a value outside its choices."""
        out = filled(case, self.settings, f"family {self.name}")
        if case.tensors is not None and not self.stored:
            raise UsageError(f"case {case.id}: family {self.name} does not say what tensors it stores (Family.stored)")
        named = {n: getattr(out, n) for n in self.shapes if hasattr(out, n)}
        for name, value in named.items():
            if isinstance(value, int) and not 1 <= value <= LARGEST_SIZE:
                raise UsageError(f"case {case.id}: {name}={shown(value)} must be between 1 and {LARGEST_SIZE:,}")
        numbers = [v for v in named.values() if isinstance(v, int)]
        entries = max(math.prod(self.sizes(out)), *(a * b for a in numbers for b in numbers if a is not b), 1)
        if entries > LARGEST_CASE:  # no machine holds it
            sizes = ", ".join(f"{n}={shown(v)}" for n, v in named.items())
            raise UsageError(f"case {case.id}: {sizes}: {entries:,} entries in one tensor, at most {LARGEST_CASE:,}")
        return out

    def case(self, seed: int, dtype: Any, settings: Mapping[str, Any]) -> Case:
        """A case from drawn settings; values that equal the default are dropped, so that equal cases have equal ids."""
        every = self.defaults
        kept = {k: v for k, v in settings.items() if v is not (d := every[k]) and (v != d or type(v) is not type(d))}
        return Case(self.name, seed, dtype, kept)

    def settled(self, seed: int, dtype: str, settings: Mapping[str, Any]) -> tuple[Case, SimpleNamespace]:
        """The case with these settings as far as they go together, and all its settings."""
        full = self.canonical(dtype, {**self.defaults, **settings})
        return self.case(seed, dtype, full), SimpleNamespace(**full)

    def example(self, number: int, dtype: str = "fp32") -> Case:
        """A case with the `number`-th last of the values that each setting draws."""
        drawn = {name: setting.drawn for name, setting in self.settings.items() if setting.drawn}
        return self.case(number, dtype, {name: values[-1 - number % len(values)] for name, values in drawn.items()})

    def sizes(self, settings: SimpleNamespace) -> tuple[int, int]:
        """(rows, length of a row) of the largest tensor that a loss holds, such as the logits, by `Setting.size`; it decides
        how many replicas fit in memory and which cases Triton's interpreter can walk through."""
        rows, length = (math.prod(int(getattr(settings, n)) for n in names) for names in self._sized)
        return max(rows, 1), max(length, 1)

    @functools.cached_property
    def _sized(self) -> tuple[list[str], list[str]]:
        """The settings of `sizes`."""
        rows, length = ([n for n, s in self.settings.items() if s.size == role] for role in ("rows", "length"))
        return rows, length


@dataclasses.dataclass(frozen=True)
class Relation:
    """An exact relation: what a change of inputs must do to every quantity."""

    # inputs -> changed inputs, or None where the relation does not apply to the case
    change: Callable[[Inputs], Inputs | None]
    factor: Mapping[str, float]  # quantity -> power-of-two factor that the change applies to it (missing: 1)
    why: str  # one line, for the report
