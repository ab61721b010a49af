"""A probe of an audit on inputs of its own: the same case with the setting and without it."""

import dataclasses
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from parity.case.case import Case
from parity.case.inputs import Inputs
from parity.case.probe import Probe
from parity.registry import loss_family

__all__ = ["Pair", "Probe", "pair"]


@dataclasses.dataclass(frozen=True)
class Pair:
    """The inputs of one case with the setting and without it; everything else is the same to the last bit."""

    case: Case
    moved: Inputs
    still: Inputs


def pair(name: str, probe: Probe, base: Mapping[str, Any], dtype: str, number: int) -> Pair:
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
    return Pair(case, moved, dataclasses.replace(still, cotangents=kept))
