"""Proof of life: one planted mistake per loss family must be caught before the green of a night means anything."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from parity.selftest.mutants import FAMILIES, controls, mutants
from parity.selftest.mutants.matrix import stream_fates

CASES = 120
"""Cases of a stream in which the planted mistake must be caught; nine in ten mutants need fewer than 20."""


@dataclasses.dataclass(frozen=True)
class Proof:
    """What became of the mistake planted in one family, and of a correct implementation beside it."""

    family: str
    device: str
    mutant: str
    caught: bool
    cases: int
    innocent: bool

    @property
    def holds(self) -> bool:
        """Whether the wrong one was caught and the correct one was not."""
        return self.caught and self.innocent

    def __str__(self) -> str:
        result = f"caught after {self.cases} cases" if self.caught else f"NOT caught in {self.cases} cases"
        beside = "" if self.innocent else "; a correct implementation was called wrong"
        return f"{self.family} on {self.device}: planted {self.mutant}: {result}{beside}"


def proof(device: str, night: int, families: Sequence[str] = FAMILIES) -> list[Proof]:
    """Plant one mistake per family, another one each night, and run drawn cases until it is caught."""
    out = []
    for name in families:
        known = mutants(name)
        planted = known[night % len(known)]
        control = controls(name)[0]
        wrong, right = stream_fates(name, night, CASES, [planted], [control], device)
        out.append(Proof(name, device, planted.name, wrong.killed, wrong.cases, not right.killed))
    return out
