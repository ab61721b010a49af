"""Pairs of inputs, with and without a setting, and the definition on both, computed once for all implementations."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

from parity.case.case import Case
from parity.case.probe import Probe
from parity.judging.assess import CaseOracle
from parity.judging.oracle import exact
from parity.registry import loss_family

MOVES = 0.05
"""Least relative change of a quantity of the definition: a hundred times the rounding of float16, twelve of bfloat16."""
TRIES = 16
"""Pairs drawn until enough of them move."""


@dataclasses.dataclass(frozen=True)
class Pair:
    """One case with the setting (`moved`) and without it (`still`), both with the definition run on them.

    Everything but the setting is the same to the last bit.
    """

    case: Case
    moved: CaseOracle
    still: CaseOracle

    def shift(self) -> float:
        """The largest relative change of a judged quantity of the definition, infinite where only one side has it."""
        a, b = self.moved.exact, self.still.exact
        names = [n for n in a if n in self.moved.inputs.cotangents or n.startswith("grad_")]
        return max(float((a[n] - b[n]).norm() / a[n].norm().clamp(min=1e-30)) if n in b else math.inf for n in names)


def pair(name: str, probe: Probe, base: Mapping[str, Any], dtype: str, number: int, device: str = "cpu") -> Pair:
    """The `number`-th pair of a probe; log-probs that derive from the oracle are those of the moved side on both."""
    fam = loss_family(name)
    wanted = fam.example(number) | dict(base) | dict(probe.among)
    moving = {} if probe.data else {probe.setting: probe.value}
    case = fam.case(1000 + number, dtype, wanted | moving)
    moved = fam.build(case)
    if probe.leaves:
        moved = dataclasses.replace(moved, leaves=probe.leaves)
    defaults = {n: fam.settings[n].default for n in (probe.setting, *probe.back)}
    settings = SimpleNamespace(**vars(moved.settings) | defaults)
    still = dataclasses.replace(moved, settings=settings).replace(**probe.off(moved))
    kept = {n: g for n, g in still.cotangents.items() if n not in probe.outputs}
    sides = moved, dataclasses.replace(still, cotangents=kept)
    return Pair(case, *(CaseOracle(fam, x.to(device), exact(fam, x)) for x in sides))


class Pairs:
    """The pairs of one probe, made when an implementation asks for them and shared by all."""

    def __init__(self, name: str, probe: Probe, device: str):
        self.name, self.probe, self.device = name, probe, device
        self._made: dict[tuple[int, str, int], Pair] = {}

    def moving(self, base: int, dtype: str) -> Iterator[Pair]:
        """Pairs on which the definition moves, or, where the probe says so, stays."""
        for number in range(TRIES):
            key = (base, dtype, number)
            if key not in self._made:
                self._made[key] = pair(self.name, self.probe, self.probe.bases[base], dtype, number, self.device)
            if (self._made[key].shift() >= MOVES) != self.probe.stays:
                yield self._made[key]
