"""Mutants of family `preference`: one step of a correct loss exchanged for a wrong one; most stand in `losses.toml`."""

import torch

from cases.selftest.controls import preference as right
from cases.selftest.controls.logprobs import Steps
from cases.selftest.controls.preference import ORDER, Work, loss_of
from cases.selftest.mutants.conduct import around
from cases.selftest.mutants.mutant import Edited
from cases.selftest.mutants.steps import Wrong, defaults, exchanged, scaled_gradients
from parity.families.preference import PARTS


def _of(c: Work, method: str, wrong: torch.Tensor, *loss_types: str) -> torch.Tensor:
    """What completions compare to, exchanged in some losses."""
    named = c.s.method == method and (not loss_types or c.s.loss_type in loss_types)
    return wrong if named else right.compared(c)


def _other(c: Work, **settings: object) -> Work:
    """The same with other settings."""
    return Work(**vars(c) | {"s": Work(**vars(c.s) | settings)})


def _mutants() -> Wrong:
    found = around(loss_of(), "ids", "ref_hidden", "ref_weight", "labels")
    for name, mistake, read in scaled_gradients("hidden", "weight", "bias"):
        found[name] = (mistake, loss_of(Steps(read=read).head))
    head = defaults(Steps)
    for name, mistake, steps in exchanged("preference", head | ORDER, globals()):
        of_head = {step: steps.pop(step) for step in [*steps] if step in head}
        found[name] = (mistake, loss_of(Steps(**of_head).head if of_head else None, **steps))
    return found


EDITED = Edited({"steps": loss_of()}, _mutants(), ("plain", "autocast"), dict.fromkeys(PARTS, ""))
