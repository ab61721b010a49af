"""The load-balancing loss of a mixture of experts, by its definition."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from parity.trainers.definitions import training_step


def balance(model: Any, sequences: Sequence[Sequence[int]]) -> Tensor:
    """E·Σ_i f_i·P_i over all tokens of the sequences in all layers, 0-dim (Switch Transformer, arXiv 2101.03961, 4 to 6).

    E: experts; f_i: how often expert i is among the k chosen, per token (Σ f = k; no gradient); P_i: the mean of its
    probability. 1 for k = 1 where every expert gets the same.
    """
    batch = training_step.rows(sequences)
    counted = batch["attention_mask"].flatten().bool()
    found = model(**batch, use_cache=False, output_router_logits=True).router_logits
    p = torch.cat([torch.softmax(z[counted], -1) for z in found])
    chosen = p.topk(model.config.get_text_config().num_experts_per_tok, -1).indices
    f = torch.nn.functional.one_hot(chosen, p.shape[-1]).sum((0, 1)) / len(p)
    return p.shape[-1] * (f * p.mean(0)).sum()
