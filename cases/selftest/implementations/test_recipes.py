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
"""The float32 gradient of a head that is cast does not lose what float16 cannot hold."""
CROSSING = {"B": 1, "T": 7, "V": 1023, "H": 2, "level": 150.0, "targets": "edge", "logit_scale": 0.3, "ids_dtype": "int32",
            "layouts": "mixed", "grad": "hidden weight", "context": "autocast_fp16", "cotangent": "ones", "lengths": [3],
            "holes": True, "mask_dtype": "int32", "loss_type": "dr_grpo", "importance_sampling_level": "sequence",
            "delta": 4.0, "beta": 0.5, "use_bias_correction_kl": True, "old": "inside", "ratio": "sequence",
            "off_policy_mask_threshold": 0.1, "sampler": "old", "entropy_coef": 0.00649, "advantages": "negative",
            "accumulation": 32, "max_completion_length": 4096}  # fmt: skip
"""Where the entropy's gradient crosses 0 that of a word is rounding of the cast inputs: 10⁻⁹, which torch's own flushes."""
CAPPED = {"B": 1, "T": 64, "V": 26, "H": 16, "peak": 50.0, "targets": "likely", "softcap": 30.0, "logit_scale": 2.01,
          "context": "autocast"}  # fmt: skip
"""Seven logits at the cap are alike in bfloat16: cut-cross-entropy was called wrong, 14 times the allowed error."""
BIAS = {"B": 4, "T": 9, "V": 234, "H": 16, "peak": 12.0, "targets": "edge", "bias": "random", "layout": "transposed",
        "layouts": "mixed", "cotangent": "ones", "context": "autocast_fp16", "method": "kto", "loss_type": "kto",
        "beta": 1.0, "ignored": "none"}  # fmt: skip
"""A float32 bias added to logits of autocast keeps gradients that float16 flushes: Liger's KTO was called wrong by 8e-10."""
OVERFLOW = {"B": 1, "T": 2, "V": 72, "H": 6, "targets": "edge", "bias": "random", "layout": "offset", "cotangent": "fine",
            "lengths": [2], "mask_dtype": "bool", "loss_type": "dapo", "importance_sampling_level": "sequence",
            "epsilon_high": 0.5, "beta": 0.5, "use_bias_correction_kl": True, "old": "extreme", "ratio": "sequence",
            "sampler": "given", "advantages": "negative", "other_tokens": 7, "max_completion_length": 2}  # fmt: skip
ONE_TOKEN = {"B": 1, "T": 1, "V": 9, "H": 1, "peak": 4.0, "bias": "random", "old": "extreme", "advantages": "fine"}
"""One chunk holds a bias gradient that overflows before the upstream gradient makes it fit."""


@pytest.mark.parametrize(
    ("case", "implementation", "quantities"),
    [
        (Case("divergence", seed, "fp16", DIVERGENCE), "trl.ChunkedDivergenceFunction", "grad_weight grad_bias")
        for seed in range(4)  # 1, of twenty seconds, is right by replicas on float16's own numbers alone
    ]
    + [
        (Case("policy", 12993, "fp32", CROSSING), "fixes.FusedLinearGRPOLoss", "grad_hidden grad_weight"),
        (Case("logprobs", 2, "fp32", CAPPED), "cce.torch_compile", "logps"),
        (Case("preference", 2379, "fp32", BIAS), "liger.FusedLinearKTOLoss", "grad_bias"),
        (Case("policy", 186595, "fp16", OVERFLOW), "liger.FusedLinearGRPOLoss", "grad_bias grad_weight"),
        (Case("policy", 186595, "fp16", ONE_TOKEN), "liger.FusedLinearGRPOLoss", "grad_bias grad_weight"),
    ],
)
def test_a_right_implementation_that_was_called_wrong_agrees(case, implementation, quantities):
    found = list(run_case(case, select([implementation])))
    rows = {r.quantity: r for r in found}
    assert {rows[name].verdict for name in quantities.split()} == {"agree"}
    assert not [(r.quantity, r.gate, r.headroom) for r in found if r.verdict == "disagree"]
    if implementation == "liger.FusedLinearGRPOLoss":
        assert rows["grad_bias"].undecided > 0


@pytest.mark.parametrize("kind", ["grpo", "bnpo", "dr_grpo"])
def test_a_batch_without_a_scored_token_has_a_loss_of_0(kind):
    settings = {"B": 2, "T": 1, "V": 9, "H": 4, "lengths": [0, 0], "loss_type": kind}
    rows = list(run_case(Case("policy", 0, "fp32", settings), select(["liger.triton_grpo_loss.unreduced"]), DEVICE))
    assert [r.verdict for r in rows if r.quantity == "loss"] == ["agree"]


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
