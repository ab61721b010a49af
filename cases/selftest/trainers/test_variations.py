"""What the variations of a twin are judged by: the cut of truncated sequences and the sampler's ratios by hand, the balance of
experts as transformers has it."""

import math
from types import SimpleNamespace

import pytest
import torch
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from parity.trainers.checks import sampler, variations
from parity.trainers.definitions.formulas import padded
from parity.trainers.definitions.scored import Scored, rows
from parity.trainers.rig import stored_window
from parity.trainers.rig.stored_window import Window


def test_the_cut_by_hand():
    window = [(list(range(12)), 3), ([1, 2, 3], 1)]
    assert variations.cut(window, "keep_start") == [(list(range(10)), 3), ([1, 2, 3], 1)]
    assert variations.cut(window, "keep_end") == [(list(range(2, 12)), 1), ([1, 2, 3], 1)]


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("mode", ["keep_start", "keep_end"])
def test_some_of_the_window_is_cut_and_all_of_it_can_be_scored(mode, side):
    whole = Window.of("dpo-trainer")
    window, cut = (w.pair()[side] for w in (whole, variations.Cut("dpo-trainer", whole.rows, mode=mode)))
    assert 0 < sum(a != b for a, b in zip(window, cut, strict=True)) < len(window)
    assert all(0 < start < len(tokens) for tokens, start in cut)


def test_the_balance_of_experts_is_the_models_own():
    model = stored_window.policy(variations.EXPERTS, torch.float64)
    window = [tokens for tokens, _ in Window.of("sft-trainer").sequences]
    batch = rows(window)
    with torch.no_grad():
        found = model(**batch, output_router_logits=True).router_logits
        theirs = float(load_balancing_loss_func(found, model.config.num_experts, 2, batch["attention_mask"]))
        assert float(variations.balance(model, window)) == pytest.approx(theirs, rel=1e-6)


@pytest.mark.parametrize(
    ("mode", "low", "expected"),
    [
        ("token_truncate", None, [[2.0, 0.25, 1.0], [1.0, 2.0, 1.5]]),
        ("token_truncate", 0.5, [[2.0, 0.5, 1.0], [1.0, 2.0, 1.5]]),
        ("token_mask", None, [[0.0, 0.25, 1.0], [1.0, 2.0, 1.5]]),
        ("token_mask", 0.5, [[0.0, 0.0, 1.0], [1.0, 2.0, 1.5]]),
        ("sequence_truncate", None, [[1.0], [2.0]]),
        ("sequence_mask", None, [[1.0], [0.0]]),
        ("sequence_mask", 1.5, [[0.0], [0.0]]),
    ],
)
def test_ratios_by_hand(mode, low, expected):
    """Token ratios 4, 0.25 and a masked one; 1 (no log-prob), 2 and 1.5: sequences 1 and 3; upper bound 2."""
    s = SimpleNamespace(mode=mode, low=low, high=2.0)
    reported = torch.tensor([[-2.0, -1.0, -9.0], [math.nan, -1.0, -1.0]])
    apart = torch.tensor([[4.0, 0.25, 7.0], [5.0, 2.0, 1.5]], dtype=torch.float64).log()
    mask = torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 1.0]])
    found = sampler.ratio(s, reported, reported.double().nan_to_num(-3.0) + apart, mask)
    assert torch.allclose(found, torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("tools", [False, True])
@pytest.mark.parametrize("mode", sampler.MODES)
def test_no_ratio_is_near_a_bound_and_the_bounds_bite(mode, tools):
    window = Window.of("grpo-trainer").sequences
    s = SimpleNamespace(mode=mode, low=None, high=math.inf)
    with torch.no_grad():
        scored = Scored(stored_window.policy("llama", torch.float64), window)
        logps = padded(scored.tokens)
    own = [stored_window.external(t) if tools else torch.ones_like(t) for t in scored.completions]
    found = sampler.ratio(s, padded(sampler.log_probs(window, False, tools)), logps, padded(own)).flatten()
    for bound in (0.5, 2.0, 30.0):
        assert (found / bound - 1).abs().min() > 1e-3
    assert 0 < int((found > 2.0).sum()) < len(found)
    assert 0 < int((found < 0.5).sum()) < len(found)
