"""A loss family as a record: its settings, how its cases are drawn and built, and the definition of its outputs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, Protocol

import torch

from parity.case.case import Case
from parity.case.inputs import Inputs, Setting, filled
from parity.case.probe import Probe, derived
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
class Family:
    """A loss family: everything that the commands need of it. What has a default works with it.

    The definition. Tensors may be any that `build` makes: no name is demanded.

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
        variants: name -> an oracle with another definition, such as an older release's, tried where something disagrees.
        demands: inputs -> names of the settings and tensors that a function must have parameters for to handle them.
        required: parameter names by which a user's function is recognised as belonging to the family.
        relations: name -> `Relation`, the exact relations.

    How it is judged and reported:

    Attributes:
        replicated: tensors of which every replica has its own, rounded by itself; None: every one of floating point.
        shapes: the settings that are sizes; rows show them always, and the last is the length of a row of `grid`.
        grid: settings -> (rows, length of a row) of the largest tensor that a loss holds, such as the logits; it decides how
            many replicas fit in memory and which cases Triton's interpreter can walk through. None: by `shapes`.
        place: (inputs, quantity, index) -> what an entry belongs to, for the worst entries of a finding.
        factors: inputs -> name -> number by whose power an error may be off, for a finding's message.

    Its cases, and what the other commands ask about them:

    Attributes:
        drawn: profile -> number of drawn cases.
        settled: (dtype, every setting) -> the same with those at their defaults that have no meaning beside others; `draw`
            ends with it, and two settings that it does not leave together are no pair that a run owes.
        example: number -> settings of a small case without special values; the audit and `parity compare` start
            from it.
        bases: settings with which an implementation may run that refuses the defaults, as early releases do.
        probes: what `parity audit` moves; empty: every choice and every number, see `parity.case.probe.derived`.
        config_fields: settings that a field of the same name decides in the configuration of TRL's trainer.
        stored: tensors that a case may store -> their dimensions, a letter each ("BTH", "BT|B1" where there are two ways);
            what `build` then makes of `case.tensors`. Empty: cases of the family store none.
        derived: (stored tensors, file) -> the settings that they decide.
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
    replicated: frozenset[str] | None = None
    shapes: tuple[str, ...] = ("B", "T", "V", "H")
    grid: Callable[[SimpleNamespace], tuple[int, int]] | None = None
    place: Callable[[Inputs, str, tuple[int, ...]], dict[str, Any]] = lambda inputs, quantity, index: {}
    factors: Callable[[Inputs], dict[str, float]] = numbers
    drawn: Mapping[str, int] = dataclasses.field(default_factory=lambda: DRAWN)
    settled: Callable[[str, dict[str, Any]], dict[str, Any]] = lambda dtype, settings: settings
    example: Callable[[int], dict[str, Any]] = lambda number: {}
    bases: tuple[Mapping[str, Any], ...] = ()
    probes: tuple[Probe, ...] = ()
    config_fields: tuple[str, ...] = ()
    stored: Mapping[str, str] = dataclasses.field(default_factory=dict)
    derived: Callable[[Mapping[str, torch.Tensor], str], dict[str, Any]] = lambda tensors, where: {}

    def full_settings(self, case: Case) -> SimpleNamespace:
        """Every setting of `case`, defaults filled in.

        Raises:
            UsageError: for a setting that the family does not have, or a value outside its choices.
        """
        out = filled(case, self.settings, f"family {self.name}")
        if case.tensors is not None and not self.stored:
            raise UsageError(f"case {case.id}: family {self.name} does not say what tensors it stores (Family.stored)")
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

    def audited(self) -> tuple[Probe, ...]:
        """What an audit moves."""
        return self.probes or derived(self.settings, self.example(0))


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
