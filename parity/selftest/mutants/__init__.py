"""Mutants: deliberately wrong implementations, each a small edit of a correct one. The harness must catch them all.

`parity mutants` runs every mutant through the code path of a real run until its first kill; what survives is a bug of
the generator or of a gate. The correct implementations that they are edits of, and those of
`parity.selftest.controls`, run on the same cases as controls: none may be killed.
"""

import dataclasses
import functools
import importlib
from collections.abc import Mapping

from parity.implementations.implementation import Adapter, Implementation
from parity.registry import NAMES, loss_family
from parity.selftest.controls import controls_of, recorded
from parity.selftest.mutants.conduct import ANYWHERE, MISCONDUCT

FAMILIES = NAMES
"""Loss families whose mutants are modules here; those of another family stand in its record, see `Family.mutants`."""
TRAINERS = (
    "sft-trainer",
    "dpo-trainer",
    "kto-trainer",
    "grpo-trainer",
    "rloo-trainer",
    "online-dpo-trainer",
    "distillation-trainer",
)
"""Trainers with mutants, see `parity.selftest.mutants.trainers`."""


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A wrong implementation with its mistake in one line; a control has none."""

    implementation: Implementation
    mistake: str
    pure: bool = True
    """Whether its results follow from its inputs alone."""

    @property
    def name(self) -> str:
        """The last part of the id for a mutant, the id for a control."""
        return self.implementation.id.rsplit(".", 1)[-1] if self.mistake else self.implementation.id


@dataclasses.dataclass(frozen=True)
class Edited:
    """What the mutants of a family are.

    Attributes:
        correct: name -> the adapters that they are edits of.
        wrong: name -> the mistake in one line, and the adapter that makes it; or an `Implementation`, which brings its own
            recipe, contexts and outputs.
        contexts: call contexts that they are judged in.
        offered: optional output -> prefix of the mutants that offer it; the empty prefix: all.
    """

    correct: Mapping[str, Adapter]
    wrong: Mapping[str, tuple[str, Adapter | Implementation]]
    contexts: tuple[str, ...] = ("plain",)
    offered: Mapping[str, str] = dataclasses.field(default_factory=dict)


@functools.cache
def edited(family: str) -> Edited:
    """The mutants of a family of the package, or of the record of another: its own, and misconduct around its first control."""
    if family in FAMILIES:
        found: Edited = importlib.import_module(f"{__name__}.{family}").EDITED
        return found
    first = next(iter(controls_of(family)), None)
    found_wrong = {n: (m, recorded(family, n, f)) for n, (m, f) in loss_family(family).mutants.items()}
    if first is None:
        return Edited({}, found_wrong)
    around = {
        n: (m, dataclasses.replace(first, call=w(first.call))) for n, (m, w) in MISCONDUCT.items() if n in ANYWHERE
    }
    return Edited({}, around | found_wrong)


@functools.cache
def mutants(family: str) -> tuple[Mutant, ...]:
    """The mutants of a family."""
    return tuple(
        _of(family, name, call, mistake, name not in MISCONDUCT)
        for name, (mistake, call) in edited(family).wrong.items()
    )


@functools.cache
def controls(family: str) -> tuple[Mutant, ...]:
    """The correct implementations that the mutants are edits of, and the correct ones."""
    return originals(family) + tuple(Mutant(implementation, "") for implementation in controls_of(family))


@functools.cache
def originals(family: str) -> tuple[Mutant, ...]:
    """The correct implementations that the mutants of a family are edits of."""
    return tuple(_of(family, f"correct-{name}", call, "") for name, call in edited(family).correct.items())


def _of(family: str, name: str, call: Adapter | Implementation, mistake: str, pure: bool = True) -> Mutant:
    of, id = edited(family), f"mutant.{family}.{name}"
    if isinstance(call, Implementation):
        return Mutant(dataclasses.replace(call, id=id), mistake, pure)
    offered = {output for output, prefix in of.offered.items() if not mistake or name.startswith(prefix)}
    implementation = Implementation(
        id=id,
        family=family,
        role="candidate",
        call=call,
        outputs=frozenset(offered),
        contexts=frozenset(of.contexts),
    )
    return Mutant(implementation, mistake, pure)
