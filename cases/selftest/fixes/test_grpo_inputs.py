"""`FusedLinearGRPOLoss` at the edge of what it takes: masked tokens, weights beyond every number, bad arguments."""

import math

import pytest
import torch

from cases.selftest.fixes.test_grpo import call, draw, exact, ours
from parity.families.policy_settings import LOSS_TYPES
from parity.fixes import FusedLinearGRPOLoss


def test_what_stands_under_the_mask_never_matters():
    settings = {"off_policy_mask_threshold": 0.05, "top_entropy_quantile": 0.6, "entropy_coef": 0.2, "beta": 0.3}
    settings |= {"use_bias_correction_kl": True, "temperature": 0.8}
    for kind in LOSS_TYPES:
        settings |= {"loss_type": kind, "max_completion_length": 9}
        case = draw(40, torch.float32, ratio="token")
        loss, metrics, grads = ours(case, settings)
        hidden_from_view = case["mask"] == 0
        garbage = dict.fromkeys(("hidden", "ref", "ratio"), math.nan) | {"ids": -5, "old": math.inf, "samp": math.inf}
        for name, value in garbage.items():
            case[name] = case[name].clone()
            case[name][hidden_from_view] = value
        case["advantages"] = case["advantages"].clone()
        case["advantages"][-1] = math.nan
        again, other, found = ours(case | {"mask": case["mask"].bool()}, settings)
        assert torch.equal(loss, again)
        assert all(torch.equal(metrics[k], other[k]) for k in metrics)
        assert all(torch.equal(g, w) for g, w in zip(found, grads, strict=True))


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("kind", LOSS_TYPES)
def test_a_weight_beyond_every_number_spoils_nothing(kind, level):
    """w = e^2000 where clipping, an advantage of 0 or a mask leave nothing of it: finite, and no gradient but the KL's."""
    case = draw(2, torch.float64, shape=(3, 6))
    case["mask"][:] = 1
    case["ref"] = exact(case)
    case["old"] = case["ref"] - 2000.0
    case["advantages"] = torch.tensor([1.0, 0.0, -2.0])  # the last sequence is masked for being off policy, or bounded
    for extra in ({"off_policy_mask_threshold": -1.0}, {"delta": 4.0, "use_bias_correction_kl": True, "beta": 0.0}):
        if "delta" in extra and kind in ("cispo", "sapo", "vespo"):
            continue
        settings = {
            "loss_type": kind,
            "importance_sampling_level": level,
            "max_completion_length": 6,
            "epsilon_high": 0.5,
        }
        loss, _, gradients = ours(case | {"samp": case["ref"]}, settings | extra)
        assert loss.isfinite()
        weight = {"cispo": 0.5, "vespo": 0.0}.get(kind)
        for gradient in gradients:
            assert gradient.isfinite().all()
            assert weight == 0.5 or gradient.abs().max() < 1e-12


def test_a_weight_beyond_every_number_that_counts_is_not_hidden():
    """Neither clipped nor masked: the loss is infinite, and its gradient is not the 0 of a clamp."""
    hidden, mask = torch.randn(1, 3, 4, requires_grad=True), torch.ones(1, 3)
    old = torch.full((1, 3), -2000.0)
    arguments = (torch.randn(7, 4), torch.zeros(1, 3, dtype=torch.long), mask, torch.tensor([-1.0]))
    loss, _ = FusedLinearGRPOLoss(beta=0.0, loss_type="bnpo")(hidden, *arguments, old_per_token_logps=old)
    assert loss == math.inf
    assert not torch.autograd.grad(loss, hidden)[0].isfinite().any()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32], ids=str)
def test_narrow_ids(dtype):
    """A vocabulary beyond what the dtype of the ids holds, and -100 at padding, wrap around nowhere."""
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(2, 6, 4, generator=g), torch.randn(40000, 4, generator=g)
    ids, mask = torch.randint(120, (2, 6), generator=g), torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 0, 0, 0, 0]])
    hidden[:, 4:] = math.nan
    found = [FusedLinearGRPOLoss(beta=0.0)(hidden, weight, x, mask, torch.ones(2))[1] for x in (ids, ids.to(dtype))]
    assert torch.equal(found[0]["entropy"], found[1]["entropy"])
    assert found[0]["entropy"].isfinite()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss_type": "ppo"}, "loss_type='ppo'"),
        ({"importance_sampling_level": "word"}, "importance_sampling_level='word'"),
        ({"loss_type": "dr_grpo"}, "max_completion_length=None"),
        ({"delta": -1.0}, "delta=-1.0"),
        ({"sapo_temperature_pos": 0}, "sapo_temperature_pos=0"),
        ({"top_entropy_quantile": 1.5}, "top_entropy_quantile=1.5"),
        ({"epsilon_low": math.nan}, "epsilon_low=nan"),
        ({"use_ref_model": False}, "use_ref_model=False with beta=0.04"),
        ({"epsilon_high": None}, "epsilon_high=None: must be a number"),
        ({"beta": "0.1"}, "beta='0.1': must be a number"),
        ({"temperature": 1e-38}, "logit_scale=1.0, temperature=1e-38: logit_scale / temperature is beyond 2..64"),
        ({"chunk_size": 0}, "chunk_size=0"),
        ({"beta": math.nan}, "beta=nan"),
        ({"entropy_coef": math.inf}, "entropy_coef=inf"),
        ({"vespo_k_neg": math.nan}, "vespo_k_neg=nan"),
        ({"off_policy_mask_threshold": math.nan}, "off_policy_mask_threshold=nan"),
    ],
)
def test_bad_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        FusedLinearGRPOLoss(**settings)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ratio": torch.full((3, 6), math.nan)}, "vllm_is_ratio: contains nan"),
        ({"ratio": torch.full((3, 1), -1.0)}, "vllm_is_ratio: contains -1"),
        ({"ratio": torch.ones(2, 6)}, r"vllm_is_ratio of shape \(2, 6\)"),
        ({"advantages": torch.full((3,), math.inf)}, "advantages: contains inf"),
        ({"advantages": torch.ones(3, 5)}, r"advantages of shape \(3, 5\)"),
        ({"old": torch.full((3, 6), math.nan)}, "old_per_token_logps: contains nan"),
        ({"old": torch.zeros(3, 5)}, r"old_per_token_logps of shape \(3, 5\)"),
        ({"ref": None}, "beta=0.04: needs ref_per_token_logps"),
        ({"mask": torch.full((3, 6), 0.5)}, "attention_mask: contains 0.5"),
        ({"mask": torch.ones(3, 5)}, r"attention_mask of shape \(3, 5\)"),
        ({"ids": torch.full((3, 6), 99)}, r"selected_token_ids: contains 99, outside \[0, 37\)"),
        ({"ids": torch.full((3, 6), -100)}, r"selected_token_ids: contains -100, outside \[0, 37\)"),
        ({"ids": torch.ones(3, 6)}, "selected_token_ids of dtype torch.float32"),
        ({"hidden": torch.zeros(3, 6, 4)}, r"_input of shape \(3, 6, 4\)"),
        ({"weight": torch.zeros(37, 5, dtype=torch.long)}, "lin_weight of dtype torch.int64"),
        ({"bias": torch.zeros(4)}, r"bias of shape \(4,\)"),
        ({"items": -1}, "num_items_in_batch: contains -1"),
        ({"items": math.nan}, "num_items_in_batch: contains nan"),
        ({"items": torch.ones(2)}, r"num_items_in_batch of shape \(2,\)"),
        ({"items": "all"}, "num_items_in_batch='all': must be a number"),
        ({"ids": [[1]]}, r"selected_token_ids=\[\[1\]\]: must be a tensor"),
        ({"ratio": 1.0}, r"vllm_is_ratio=1\.0: must be a tensor"),
        ({"samp": torch.full((3, 6), math.inf)}, "sampling_per_token_logps: contains inf"),
    ],
)
def test_bad_input_is_named(change, message):
    case = draw(14, torch.float32) | {"items": None} | change
    if case["mask"] is not None and case["mask"].shape == (3, 6) and not case["mask"].is_floating_point():
        case["mask"][0] = 1
    with pytest.raises(ValueError, match=message):
        call(FusedLinearGRPOLoss(), case, case["items"])


def test_settings_changed_between_calls_are_checked_again():
    case, fused = draw(14, torch.float32), FusedLinearGRPOLoss(beta=0.0)
    for name in ("current_gradient_accumulation_steps", "steps_per_generation"):
        with pytest.raises(ValueError, match=f"{name}=-1"):
            call(fused, case, **{name: -1})
    fused.delta = 0.0
    with pytest.raises(ValueError, match=r"delta=0\.0"):
        call(fused, case)
