"""The load-balancing loss by its definition: as transformers has it, without what padding adds."""

import pytest
import torch

from parity.trainers.checks.variations import EXPERTS, balance
from parity.trainers.rig import stored_window
from parity.trainers.rig.stored_window import Window

WINDOW = [tokens for tokens, _ in Window.of("sft-trainer").sequences]


def test_balance_is_the_models_own():
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    model = stored_window.policy(EXPERTS, torch.float64)
    width = max(map(len, WINDOW))
    mask = torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids in WINDOW])
    rows = torch.tensor([[*ids, *[0] * (width - len(ids))] for ids in WINDOW])
    with torch.no_grad():
        found = model(input_ids=rows, attention_mask=mask, output_router_logits=True).router_logits
        theirs = float(load_balancing_loss_func(found, model.config.num_experts, 2, mask))
        assert float(balance(model, WINDOW)) == pytest.approx(theirs, rel=1e-6)
