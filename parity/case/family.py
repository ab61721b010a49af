"""A loss family as a record: its settings, how its cases are drawn and built, and the definition of its outputs."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, Protocol

import torch

from parity.case.case import Case
from parity.case.inputs import Inputs, Setting, filled
from parity.decoding import shown
from parity.errors import UsageError

LARGEST_SIZE, LARGEST_CASE = 1 << 24, 1 << 28
"""Of one dimension, and entries of the logits or of a head: 2 GiB in the float64 of the oracle."""


Oracle = Callable[[Inputs], dict[str, torch.Tensor]]

DRAWN: Mapping[str, int] = {"quick": 60, "pr": 400, "nightly": 6000, "soak": 60000}
"""Profile -> cases of a family that it draws, over all shards."""


def numbers(inputs: Inputs) -> dict[str, float]:
    """The numeric settings of a case by name, by which an error may be too large."""
    found = {n: v for n, v in vars(inputs.settings).items() if isinstance(v, int | float) and not isinstance(v, bool)}
    return {n.replace("_", " "): float(v) for n, v in found.items() if v and math.isfinite(v)}


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
class Output:
    """What a family returns under a name.

    Attributes:
        optional: whether an implementation may leave it out.
        scalar: whether the scalar gate judges it.
        counted: whether it must match to the last bit of float32 (counts, clip fractions).
    """

    optional: bool = False
    scalar: bool = False
    counted: bool = False


@dataclasses.dataclass(frozen=True)
class Drawing:
    """How the cases of a family are made.

    Attributes:
        draw: `draw(draw, strategies, dtype, profile, contexts) -> settings`, drawn with Hypothesis.
        canonical: (dtype, every setting) -> the same with those at their defaults that have no meaning beside others; `draw`
            ends with it, and two settings that it does not leave together are no pair that a run owes.
        counts: profile -> number of drawn cases.
        contexts: call contexts that make sense for the family.
        example: number -> settings of a small case without special values; the audit and `parity compare` start from it.
    """

    draw: Callable[..., dict[str, Any]]
    canonical: Callable[[str, dict[str, Any]], dict[str, Any]] = lambda dtype, settings: settings
    counts: Mapping[str, int] = dataclasses.field(default_factory=lambda: DRAWN)
    contexts: tuple[str, ...] = ("plain", "checkpoint", "compile")
    example: Callable[[int], dict[str, Any]] = lambda number: {}


@dataclasses.dataclass(frozen=True)
class Tensors:
    """What is known of the tensors of a family by name.

    Attributes:
        replicated: those of which every replica has its own, rounded by itself; None: every one of floating point.
        required: parameter names by which a user's function is recognised as belonging to the family.
        demands: inputs -> names of the settings and tensors that a function must have parameters for to handle them.
        stored: tensors that a case may store -> their dimensions, a letter each ("BTH", "BT|B1" where there are two ways);
            what `build` then makes of `case.tensors`. Empty: cases of the family store none.
        derived: (stored tensors, file) -> the settings that they decide.
    """

    replicated: frozenset[str] | None = None
    required: tuple[str, ...] = ()
    demands: Callable[[Inputs], set[str]] = lambda inputs: set()
    stored: Mapping[str, str] = dataclasses.field(default_factory=dict)
    derived: Callable[[Mapping[str, torch.Tensor], str], dict[str, Any]] = lambda tensors, where: {}


@dataclasses.dataclass(frozen=True)
class Explanations:
    """What may explain a disagreement.

    Attributes:
        variants: name -> an oracle with another definition, such as an older release's.
        place: (inputs, quantity, index) -> what an entry belongs to, for the worst entries of a finding.
        factors: inputs -> name -> number by whose power an error may be off, for a finding's message.
    """

    variants: Mapping[str, Oracle] = dataclasses.field(default_factory=dict)
    place: Callable[[Inputs, str, tuple[int, ...]], dict[str, Any]] = lambda inputs, quantity, index: {}
    factors: Callable[[Inputs], dict[str, float]] = numbers


@dataclasses.dataclass(frozen=True)
class Family:
    """A loss family: a definition, its inputs, its settings, and what its quantities are. What has a default works with it.

    Attributes:
        name: as in cases and on the command line.
        settings: every dimension with its default; shapes included.
        drawing: how its cases are made.
        build: case -> `Inputs` on the CPU, in the dtypes under test. Tensors may have any names.
        oracle: the definition, float64, plain torch, on inputs that may carry a leading replica dimension in every
            leaf. Returns the outputs; names with a leading underscore are internal: `_logps` (per-token log-probs) and
            `_terms` (what the loss sums) sharpen the gate of a scalar.
        outputs: output quantities in order.
        zeros: inputs -> quantity -> boolean mask of rows that the loss mask makes exactly zero.
        relations: name -> `Relation`, the exact relations.
        tensors: what is known of its tensors by name.
        explanations: what may explain a disagreement.
        features: case -> the facts that coverage counts and that ledger scopes can name, besides settings.
        shapes: the settings that are sizes; rows show them always, and the last is the length of a row of `grid`.
        grid: settings -> (rows, length of a row) of the largest tensor that a loss holds, such as the logits; it decides how
            many replicas fit in memory and which cases Triton's interpreter can walk through. None: by `shapes`.
    """

    name: str
    settings: Mapping[str, Setting]
    drawing: Drawing
    build: Callable[[Case], Inputs]
    oracle: Oracle
    outputs: Mapping[str, Output]
    zeros: Callable[[Inputs], dict[str, torch.Tensor]] = lambda inputs: {}
    relations: Mapping[str, Relation] = dataclasses.field(default_factory=dict)
    tensors: Tensors = Tensors()
    explanations: Explanations = Explanations()
    features: Callable[[Case], dict[str, Any]] = lambda case: {}
    shapes: tuple[str, ...] = ("B", "T", "V", "H")
    grid: Callable[[SimpleNamespace], tuple[int, int]] | None = None

    @property
    def first(self) -> str:
        """The output that comes first: the loss, or the log-probs."""
        return next(iter(self.outputs))

    @functools.cached_property
    def optional(self) -> frozenset[str]:
        """The outputs that an implementation may leave out."""
        return frozenset(name for name, output in self.outputs.items() if output.optional)

    @functools.cached_property
    def scalars(self) -> frozenset[str]:
        """The outputs that the scalar gate judges."""
        return frozenset(name for name, output in self.outputs.items() if output.scalar)

    def full_settings(self, case: Case) -> SimpleNamespace:
        """Every setting of `case`, defaults filled in.

        Raises:
            UsageError: for a setting that the family does not have, or a value outside its choices.
        """
        out = filled(case, self.settings, f"family {self.name}")
        if case.tensors is not None and not self.tensors.stored:
            raise UsageError(f"case {case.id}: family {self.name} does not say what tensors it stores (Tensors.stored)")
        self._bounded(case, out)
        return out

    def _bounded(self, case: Case, settings: SimpleNamespace) -> None:
        """Refuse sizes that no machine holds, before anything is allocated."""
        named = {n: getattr(settings, n) for n in self.shapes if hasattr(settings, n)}
        for name, value in named.items():
            if isinstance(value, int) and not 1 <= value <= LARGEST_SIZE:
                raise UsageError(f"case {case.id}: {name}={shown(value)} must be between 1 and {LARGEST_SIZE:,}")
        numbers = [v for v in named.values() if isinstance(v, int)]
        entries = max(math.prod(self.sizes(settings)), *(a * b for a in numbers for b in numbers if a is not b), 1)
        if entries > LARGEST_CASE:
            sizes = ", ".join(f"{n}={shown(v)}" for n, v in named.items())
            raise UsageError(f"case {case.id}: {sizes}: {entries:,} entries in one tensor, at most {LARGEST_CASE:,}")

    def case(self, seed: int, dtype: str, settings: Mapping[str, Any]) -> Case:
        """A case from drawn settings; values that equal the default are dropped, so that equal cases have equal ids."""
        kept = {
            k: v
            for k, v in settings.items()
            if v != self.settings[k].default or type(v) is not type(self.settings[k].default)
        }
        return Case(self.name, seed, dtype, kept)

    def sizes(self, settings: SimpleNamespace) -> tuple[int, int]:
        """(rows, length of a row) of the largest tensor of a case, each at least 1; see `grid`."""
        if self.grid is not None:
            rows, length = self.grid(settings)
        else:
            found = [int(getattr(settings, name)) for name in self.shapes if hasattr(settings, name)]
            rows, length = math.prod(found[:-1]), found[-1] if found else 1
        return max(rows, 1), max(length, 1)


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
