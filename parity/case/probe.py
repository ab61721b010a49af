"""What an audit moves: one setting away from its default, and the same inputs without it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch

from parity.case.family import CALLING
from parity.case.inputs import Inputs, Setting

Tensors = dict[str, torch.Tensor | None]


@dataclasses.dataclass(frozen=True)
class Probe:
    """A setting moved away from its default, and how to reset it on the same tensors.

    Attributes:
        setting: as in the family's table.
        value: what it is moved to.
        among: further settings, the same on both sides.
        back: settings that go back to their default with it.
        off: inputs -> tensors exchanged on the way back, where the setting is a tensor.
        bases: settings of both sides, one after the other until an implementation runs on one.
        stays: the definition does not move: an implementation that does is wrong.
        data: the value names what the tensors of every pair are, not a value of the setting.
        leaves: the only leaves, where the others would not be there without the setting.
        outputs: outputs that the setting asks for; without it they get no upstream gradient.
        note: what distinguishes it from another probe of the same setting.
    """

    setting: str
    value: Any
    among: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    back: tuple[str, ...] = ()
    off: Callable[[Inputs], Tensors] = lambda x: {}
    bases: tuple[Mapping[str, Any], ...] = ({},)
    stays: bool = False
    data: bool = False
    leaves: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    note: str = ""

    @property
    def label(self) -> str:
        """`setting=value`, with its note."""
        return f"{self.setting}={self.value}" + (f" ({self.note})" if self.note else "")


def derived(settings: Mapping[str, Setting], example: Mapping[str, Any]) -> tuple[Probe, ...]:
    """The probes of a family that names none: every choice of a setting, and a number at its value in the example.

    A number that the example leaves alone is moved to 0.7 times its default; a whole number (a shape) is not moved.
    """
    out = []
    for name, setting in settings.items():
        if name in CALLING:
            continue
        if setting.choices is not None:
            out += [Probe(name, value) for value in setting.choices if value != setting.default]
        elif (
            isinstance(setting.default, float)
            and (value := example.get(name, 0.7 * setting.default)) != setting.default
        ):
            out.append(Probe(name, value))
    return tuple(out)
