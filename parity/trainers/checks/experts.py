"""Mixtures of experts: the load-balancing loss that a trainer adds, with its weight, once for each micro-batch."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from parity.case.inputs import Setting
from parity.trainers.check import CheckCall, CheckCase, Quantity, check
from parity.trainers.checks.twins import judged, twin
from parity.trainers.definitions.formulas import Loss
from parity.trainers.definitions.scored import rows
from parity.trainers.rig import batches, drive
from parity.trainers.rig.twin_runs import Run
from parity.trainers.specs import having

MODEL = "qwen3_moe"
FIELD = "router_aux_loss_coef"
SETTINGS = {
    "coefficient": Setting(0.5, f"{FIELD} of the trainer's config", (0.5, 0.0)),
    "split": Setting("8x1", "batch x accumulation", ("8x1", "4x2")),
}
TRAINERS = having(FIELD)


def cases(seed: int) -> Iterator[CheckCase]:
    """Every trainer with and without accumulation, and with the loss turned off."""
    for trainer in TRAINERS:
        yield trainer, {}
        yield trainer, {"split": "4x2"}
        yield trainer, {"coefficient": 0.0}


@check("experts", TRAINERS, SETTINGS, cases, pr=[(trainer, {"split": "4x2"}) for trainer in TRAINERS])
def experts(call: CheckCall) -> Iterator[Quantity]:
    """Loss and gradients are those of the trainer's loss plus coefficient times the mean over micro-batches of the balance."""
    s = call.settings
    drive.needs(call.trainer, FIELD)
    settings = twin(call.case.family, model=MODEL, split=s.split)
    run = Run(call.case.family, settings, call.path, plain=True, **{FIELD: s.coefficient})
    loss = Loss(run.window, settings)

    def define(model: Any) -> Tensor:
        parts = [[tokens for tokens, _ in batches.sequences_of([batch])] for batch in run.steps.batches]
        return loss(model) + s.coefficient * torch.stack([balance(model, part) for part in parts]).mean()

    yield from judged(call, run, define)


def balance(model: Any, sequences: Sequence[Sequence[int]]) -> Tensor:
    """E·Σ_i f_i·P_i over all tokens of the sequences in all layers, 0-dim (Switch Transformer, arXiv 2101.03961, 4 to 6).

    E: experts; f_i: how often expert i is among the k chosen, per token (Σ f = k; no gradient); P_i: the mean of its
    probability. 1 for k = 1 where every expert gets the same.
    """
    batch = rows(sequences)
    counted = batch["attention_mask"].flatten().bool()
    found = model.base_model(**batch, use_cache=False, output_router_logits=True).router_logits
    p = torch.cat([torch.softmax(z[counted], -1) for z in found])
    chosen = p.topk(model.config.get_text_config().num_experts_per_tok, -1).indices
    f = torch.nn.functional.one_hot(chosen, p.shape[-1]).sum((0, 1)) / len(p)
    return p.shape[-1] * (f * p.mean(0)).sum()
