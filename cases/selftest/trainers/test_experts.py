"""The load-balancing loss by its definition: on paper, as transformers has it, and without what padding adds."""

from types import SimpleNamespace

import pytest
import torch

from parity.trainers.checks.variations import EXPERTS, balance
from parity.trainers.rig import stored_window
from parity.trainers.rig.stored_window import Window

WINDOW = [tokens for tokens, _ in Window.of("sft-trainer").sequences]


class Routed:
    """A model of which nothing is known but where it sends its tokens: `chosen` of four experts, one each."""

    def __init__(self, chosen):
        self.config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(num_experts_per_tok=1))
        self.logits = 50.0 * torch.nn.functional.one_hot(torch.tensor(chosen), 4).double()
        self.base_model = self

    def __call__(self, **given):
        return SimpleNamespace(router_logits=(self.logits,))


@pytest.mark.parametrize(("chosen", "expected"), [([0, 1, 2, 3], 1.0), ([2, 2, 2, 2], 4.0), ([0, 0, 1, 1], 2.0)])
def test_balance_on_paper(chosen, expected):
    """1 where every expert gets the same, E where one gets all, 2 where two of four share."""
    assert float(balance(Routed(chosen), [[5, 6, 7, 8]])) == pytest.approx(expected)


def test_padding_is_sent_to_nobody():
    assert float(balance(Routed([0, 0, 3, 3]), [[5, 6, 7, 8]])) == pytest.approx(2.0)
    assert float(balance(Routed([0, 0, 3, 3]), [[5, 6], [7]])) == pytest.approx(4 * (4 + 1) / 9)  # two and one of three


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
