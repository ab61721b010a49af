"""Proof of life: one planted mistake per loss family must be caught before the green of a night means anything."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from parity.case.drawing import cases, draws
from parity.case.inputs import Inputs
from parity.implementations.implementation import Implementation, Outputs
from parity.registry import NAMES, loss_family, run_case

CASES = 120
"""In which the planted mistake must be caught; it needs fewer than ten."""


@dataclasses.dataclass(frozen=True)
class Proof:
    """What became of the mistake planted in one family, and of a correct implementation beside it."""

    family: str
    device: str
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
        return f"{self.family} on {self.device}: planted gradients 1 % too large: {result}{beside}"


def proof(device: str, night: int, families: Sequence[str] = NAMES) -> list[Proof]:
    """The definition of each family in float32, right and with the mistake, on another stream of cases each night."""
    return [_proof(name, device, night) for name in families]


def _proof(name: str, device: str, night: int) -> Proof:
    of = loss_family(name)

    def right(x: Inputs) -> Outputs:
        return {n: v for n, v in of.oracle(x).items() if n in of.outputs and n not in of.optional}

    def wrong(x: Inputs) -> Outputs:  # the same values, and 101 % of their gradients
        return {n: torch.where(v.isfinite(), v + (v - v.detach()) / 100, v) for n, v in right(x).items()}

    both = [Implementation(call.__name__, name, "candidate", call) for call in (right, wrong)]
    seen, red = 0, set[str]()
    for case in draws(cases(of, ("fp32",), "pr"), f"{night}/{name}/0", CASES):
        seen += 1
        red |= {row.implementation for row in run_case(case, both, device, thorough=False) if row.failing}
        if "wrong" in red:
            break
    return Proof(name, device, "wrong" in red, seen, "right" not in red)
