"""A model that a trainer has had, and a copy of it: what a reference, an average of weights or the next trainer starts from."""

import copy
from collections.abc import Iterator

import torch
from torch import Tensor

from parity.case.inputs import Setting
from parity.trainers.check import CheckCall, CheckCase, Quantity, check, holds
from parity.trainers.checks.twin_windows import JUDGED
from parity.trainers.checks.twins import twin
from parity.trainers.rig import models
from parity.trainers.rig.twin_runs import Run

SETTINGS = {"restored": Setting(False, "the model gets its own forward back before the copy", (False, True))}
CASES: list[CheckCase] = [(trainer, settings) for trainer in JUDGED for settings in ({}, {"restored": True})]


@check("copies", JUDGED, SETTINGS, lambda seed: CASES, pr=CASES[:2], paths=("released",))
def copies(call: CheckCall) -> Iterator[Quantity]:
    """The copy computes as the original did, and goes on to when the weights of the original change."""
    built = Run(call.case.family, twin(call.case.family)).built
    original = built.model.eval()
    if call.settings.restored:
        vars(original).pop("forward", None)
    copied = copy.deepcopy(original)
    ids = torch.tensor([models.ids(9, "copied", 12)], device=original.device)

    @torch.no_grad()
    def logits(model: torch.nn.Module) -> Tensor:
        found: Tensor = model(input_ids=ids).logits
        return found

    before, of_copy = logits(original), logits(copied)
    yield holds("logits of the copy", torch.equal(before, of_copy), "they are not those of the original", "exact")
    with torch.no_grad():
        for p in original.parameters():
            p.mul_(1.25)
    off = float((logits(copied) - of_copy).abs().max())
    moved = float((logits(original) - before).abs().max())
    yield holds("logits of the original", moved > 0, "its weights were changed, and its logits are the same", "exact")
    message = (
        f"the weights of the original were changed: the copy's logits are {off:.3g} off, the original's {moved:.3g}"
    )
    yield holds("logits of the copy behind a step of the original", off == 0, message, "exact", off, 0.0)
