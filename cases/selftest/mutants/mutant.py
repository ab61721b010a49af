"""Mutants: deliberately wrong implementations, each a small edit of a correct one. The harness must catch them all.

A mutant runs through the code path of a real run until its first kill; one that survives is a bug of the generator or of a
gate. The correct implementations that they are edits of, and those of `controls.correct`, run on the same cases: none may
be called wrong.
"""

import dataclasses
import functools
import importlib
from collections.abc import Mapping

from cases.selftest.controls.correct import CONTROLS
from cases.selftest.mutants.conduct import MISCONDUCT
from parity.implementations.implementation import Adapter, Implementation
from parity.registry import NAMES

FAMILIES = NAMES
"""Loss families; the mutants of each are a module here."""


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
        wrong: name -> the mistake in one line, and the adapter that makes it.
        contexts: call contexts that they are judged in.
        offered: optional output -> prefix of the mutants that offer it; the empty prefix: all.
    """

    correct: Mapping[str, Adapter]
    wrong: Mapping[str, tuple[str, Adapter]]
    contexts: tuple[str, ...] = ("plain",)
    offered: Mapping[str, str] = dataclasses.field(default_factory=dict)


def edited(family: str) -> Edited:
    """The mutants of a family."""
    return importlib.import_module(f"cases.selftest.mutants.{family}").EDITED


@functools.cache
def mutants(family: str) -> tuple[Mutant, ...]:
    """The mutants of a family."""
    wrong = edited(family).wrong.items()
    return tuple(_of(family, name, call, mistake, name not in MISCONDUCT) for name, (mistake, call) in wrong)


@functools.cache
def controls(family: str) -> tuple[Mutant, ...]:
    """The correct implementations that the mutants are edits of, and the correct ones."""
    return originals(family) + tuple(Mutant(implementation, "") for implementation in CONTROLS[family])


@functools.cache
def originals(family: str) -> tuple[Mutant, ...]:
    """The correct implementations that the mutants of a family are edits of."""
    return tuple(_of(family, f"correct-{name}", call, "") for name, call in edited(family).correct.items())


def _of(family: str, name: str, call: Adapter, mistake: str, pure: bool = True) -> Mutant:
    of = edited(family)
    offered = {output for output, prefix in of.offered.items() if not mistake or name.startswith(prefix)}
    taken = {"outputs": frozenset(offered), "contexts": frozenset(of.contexts)}
    return Mutant(Implementation(f"mutant.{family}.{name}", family, "candidate", call, **taken), mistake, pure)
