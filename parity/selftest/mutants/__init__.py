"""Mutants: deliberately wrong implementations by which the harness is tested, each a small edit of a correct one.

`parity mutants` runs every mutant through the code path of a real run until its first kill; what survives is a bug of
the generator or of a gate. The correct implementations that they are edits of, and those of
`parity.selftest.controls`, run on the same cases as controls: none may be killed.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib

from parity.implementations.implementation import Adapter, Implementation
from parity.selftest.controls import CONTROLS
from parity.selftest.mutants.conduct import MISCONDUCT

CONTEXTS = {"logprobs": ("plain", "autocast", "checkpoint"), "policy": ("plain", "autocast"), "divergence": ("plain",)}
FAMILIES = tuple(CONTEXTS)
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
OFFERED = {
    "logprobs": dict.fromkeys(("entropy",), ""),
    "policy": {"kl": "kl-metric", "entropy": "entropy-metric"},
    "divergence": {},
}
"""Family -> optional output -> prefix of the mutants that offer it; the empty prefix: all."""


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


@functools.cache
def mutants(family: str) -> tuple[Mutant, ...]:
    """The mutants of a family."""
    module = importlib.import_module(f"{__name__}.{family}")
    return tuple(
        _of(family, name, call, mistake, name not in MISCONDUCT) for name, (mistake, call) in module.MUTANTS.items()
    )


@functools.cache
def controls(family: str) -> tuple[Mutant, ...]:
    """The correct implementations that the mutants are edits of, and the honest ones."""
    return originals(family) + tuple(Mutant(implementation, "") for implementation in CONTROLS[family])


@functools.cache
def originals(family: str) -> tuple[Mutant, ...]:
    """The correct implementations that the mutants of a family are edits of."""
    module = importlib.import_module(f"{__name__}.{family}")
    return tuple(_of(family, f"correct-{name}", call, "") for name, call in module.CORRECT.items())


def _of(family: str, name: str, call: Adapter, mistake: str, pure: bool = True) -> Mutant:
    offered = {output for output, prefix in OFFERED[family].items() if not mistake or name.startswith(prefix)}
    implementation = Implementation(
        id=f"mutant.{family}.{name}",
        family=family,
        role="candidate",
        call=call,
        outputs=frozenset(offered),
        contexts=frozenset(CONTEXTS[family]),
    )
    return Mutant(implementation, mistake, pure)
