"""Recipes say where an implementation stores something narrow, and no more: what is stored wide is not expected narrow."""

import sys

import pytest
import torch

from parity.case.case import Case
from parity.implementations import liger
from parity.implementations.limits import found_at
from parity.registry import loss_family, run_case, select

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DIVERGENCE = {"B": 1, "T": 2, "V": 32769, "H": 1, "peak": 0.05, "targets": "likely", "softcap": 10.5, "logit_scale": 0.3,
              "bias": "random", "head_dtype": "fp32", "beta": 1.0, "teacher_H": 13, "gap": "near", "teacher_peak": 4.0,
              "teacher_softcap": 3.0, "teacher_logit_scale": 2.5, "num_items": "given"}  # fmt: skip


def test_a_float32_gradient_of_a_head_that_is_cast_does_not_lose_what_float16_cannot_hold():
    rows = [
        r
        for seed in range(4)  # 1, of twenty seconds, is right by replicas on float16's own numbers alone
        for r in run_case(Case("divergence", seed, "fp16", DIVERGENCE), select(["trl.ChunkedDivergenceFunction"]))
    ]
    assert {r.quantity for r in rows} >= {"grad_weight", "grad_bias"}
    assert not [(r.quantity, r.gate, r.headroom) for r in rows if r.verdict == "disagree"]


CROSSING = {"B": 1, "T": 7, "V": 1023, "H": 2, "level": 150.0, "targets": "edge", "logit_scale": 0.3, "ids_dtype": "int32",
            "layouts": "mixed", "grad": "hidden weight", "context": "autocast_fp16", "cotangent": "ones", "lengths": [3],
            "holes": True, "mask_dtype": "int32", "loss_type": "dr_grpo", "importance_sampling_level": "sequence",
            "delta": 4.0, "beta": 0.5, "use_bias_correction_kl": True, "old": "inside", "ratio": "sequence",
            "off_policy_mask_threshold": 0.1, "sampler": "old", "entropy_coef": 0.00649, "advantages": "negative",
            "accumulation": 32, "max_completion_length": 4096}  # fmt: skip


def test_under_autocast_our_loss_keeps_gradients_that_float16_flushes():
    """Where the entropy's gradient crosses 0 that of a word is rounding of the cast inputs: 10⁻⁹, which torch's own flushes."""
    rows = list(run_case(Case("policy", 12993, "fp32", CROSSING), select(["fixes.FusedLinearGRPOLoss"])))
    assert {r.quantity for r in rows} >= {"grad_hidden", "grad_weight"}
    assert not [(r.quantity, r.gate, r.headroom) for r in rows if r.verdict == "disagree"]


def test_a_compiled_softcap_under_autocast_is_narrow():
    """Seven logits at the cap are alike in bfloat16: seed 104 called cut-cross-entropy wrong, 14 times the allowed error."""
    capped = {
        "B": 1,
        "T": 64,
        "V": 26,
        "H": 16,
        "peak": 50.0,
        "targets": "likely",
        "softcap": 30.0,
        "logit_scale": 2.01,
    }
    case = Case("logprobs", 2, "fp32", capped | {"context": "autocast"})
    (row,) = [r for r in run_case(case, select(["cce.torch_compile"]), thorough=False) if r.quantity == "logps"]
    assert row.verdict == "agree"


BIAS = {"B": 4, "T": 9, "V": 234, "H": 16, "peak": 12.0, "targets": "edge", "bias": "random", "layout": "transposed",
        "layouts": "mixed", "cotangent": "ones", "context": "autocast_fp16", "method": "kto", "loss_type": "kto",
        "beta": 1.0, "ignored": "none"}  # fmt: skip


def test_a_float32_bias_added_to_logits_of_autocast_keeps_gradients_that_float16_flushes():
    """Seed 105 called Liger's KTO wrong by 8e-10."""
    rows = run_case(Case("preference", 2379, "fp32", BIAS), select(["liger.FusedLinearKTOLoss"]))
    assert [r.verdict for r in rows if r.quantity == "grad_bias"] == ["agree"]


@pytest.mark.parametrize("kind", ["grpo", "bnpo", "dr_grpo"])
def test_a_batch_without_a_scored_token_has_a_loss_of_0(kind):
    settings = {"B": 2, "T": 1, "V": 9, "H": 4, "lengths": [0, 0], "loss_type": kind}
    rows = list(run_case(Case("policy", 0, "fp32", settings), select(["liger.triton_grpo_loss.unreduced"]), DEVICE))
    assert [r.verdict for r in rows if r.quantity == "loss"] == ["agree"]


OVERFLOW = {"B": 1, "T": 2, "V": 72, "H": 6, "targets": "edge", "bias": "random", "layout": "offset", "cotangent": "fine",
            "lengths": [2], "mask_dtype": "bool", "loss_type": "dapo", "importance_sampling_level": "sequence",
            "epsilon_high": 0.5, "beta": 0.5, "use_bias_correction_kl": True, "old": "extreme", "ratio": "sequence",
            "sampler": "given", "advantages": "negative", "other_tokens": 7, "max_completion_length": 2}  # fmt: skip


ONE_TOKEN = {"B": 1, "T": 1, "V": 9, "H": 1, "peak": 4.0, "bias": "random", "old": "extreme", "advantages": "fine"}


@pytest.mark.parametrize(("seed", "settings"), [(186595, OVERFLOW), (186595, ONE_TOKEN)])
def test_one_chunk_holds_a_bias_gradient_that_overflows_before_the_upstream_gradient_makes_it_fit(seed, settings):
    liger = select(["liger.FusedLinearGRPOLoss"])
    rows = {r.quantity: r for r in run_case(Case("policy", seed, "fp16", settings), liger)}
    assert rows["grad_bias"].verdict == "agree" and rows["grad_bias"].undecided > 0
    assert rows["grad_weight"].verdict == "agree"


def test_a_liger_without_the_module_of_its_grpo_loss_has_a_recipe(monkeypatch):
    """Liger 0.5.4 and 0.5.5."""
    monkeypatch.setitem(sys.modules, "liger_kernel.chunked_loss.fused_linear_ppo", None)
    found_at.cache_clear()
    try:
        assert not liger.streams_vocabulary()
        x = loss_family("logprobs").build(Case("logprobs", 0, "bf16", {}))
        assert liger.chunked(x).elementwise == "input"
    finally:
        found_at.cache_clear()
