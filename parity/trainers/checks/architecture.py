"""The tiny models themselves: transformers' forward and backward pass beside the architecture written out.

No trainer is in it. Elsewhere definition and trainer run the same model, so that a mistake of the model's own is in both.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from parity.case.inputs import Setting
from parity.trainers.check import CheckCall, CheckCase, Quantity, check
from parity.trainers.definitions import decoder
from parity.trainers.definitions.scored import rows
from parity.trainers.definitions.training_step import exact_step, gradients, window_loss
from parity.trainers.rig import models
from parity.trainers.rig.drawn import normal

LENGTHS = (80, 67)
"""Longer than the sliding windows of 64."""
SETTINGS = {"model": Setting("llama", "tiny model", tuple(models.ARCHITECTURES))}
CASES: list[CheckCase] = [("sft-trainer", {"model": name}) for name in models.ARCHITECTURES]
PR = [case for case in CASES if case[1]["model"] != "recurrent_gemma"]
"""Without one that is known to be wrong, which takes as long as six."""


@check(
    "architecture",
    ("sft-trainer",),
    SETTINGS,
    lambda seed: CASES,
    pr=PR,
    paths=("released",),
    drives=False,
    moves=True,
)
def architecture(call: CheckCall) -> Iterator[Quantity]:
    """Logits and every gradient of the model by itself are those of its architecture, or of the other padding and attention."""
    name = call.settings.model
    sequences = [[int(w[1:]) for w in models.words(9, f"row {n}", n).split()] for n in LENGTHS]
    upstream = [normal(9, f"upstream {n}", (n, models.VOCABULARY)) for n in LENGTHS]

    def loss(z: Sequence[Tensor]) -> Tensor:
        parts = [(g.to(own) * own).sum() for g, own in zip(upstream, z, strict=True)]
        return torch.stack(parts).sum() / sum(LENGTHS)

    exact = models.model(name, torch.float64)
    step = exact_step(exact, lambda model: loss(decoder.logits(model, name, sequences)))
    message = f"no trainer is in this: transformers' {type(exact).__name__}"
    fused = "sdpa" if exact._supports_sdpa else "eager"  # Gemma-2's softcap on scores is eager's alone
    for attention, side in (("eager", "right"), (fused, "left")):
        model = models.model(name, attention=attention).train().to(call.device)
        batch = {n: x.to(call.device) for n, x in _padded(sequences, side).items()}
        seen = batch["attention_mask"].bool()
        z = model(**batch, use_cache=False).logits
        found = loss([own[kept] for own, kept in zip(z, seen, strict=True)])
        found.backward()
        told = f"{attention} attention, padded on the {side}"
        yield _told(window_loss(step, float(found.detach()), f"logits, {told}"), message)
        grads = {n: None if p.grad is None else p.grad.cpu() for n, p in model.named_parameters()}
        yield _told(gradients(step, grads, f"gradient, {told}"), message)


def _padded(sequences: Sequence[Sequence[int]], side: str) -> dict[str, Any]:
    batch = rows(sequences)
    if side == "left":
        return {
            n: torch.stack([x.roll(len(x) - len(s)) for x, s in zip(b, sequences, strict=True)])
            for n, b in batch.items()
        }
    return batch


def _told(quantity: Quantity, message: str) -> Quantity:
    return Quantity(quantity.name, quantity.value, quantity.definition, message)
