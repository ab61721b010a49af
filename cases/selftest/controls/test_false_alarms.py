"""Controls on drawn cases: none disagrees. The long form is test_soak.py."""

import pytest

from cases.selftest.controls.correct import CONTROLS
from cases.selftest.controls.soak import drawn, page, rows, soak
from parity.case.case import Case


def affordable(cases):
    """Cases small enough for a test; the soak has the others."""
    return [c for c in cases if c.settings.get("V", 7) <= 1025 and c.settings.get("context") != "compile"]


@pytest.mark.parametrize("name", sorted(CONTROLS))
def test_no_control_disagrees(name):
    cases = affordable(drawn(name, 60, 2026))
    found = soak(cases)
    assert found.alarms == []
    assert found.total > 0.8 * len(cases) * len(CONTROLS[name])
    assert len({dtype for _, dtype in found.judged}) == 3
    assert len(found.first) <= found.total / 100, "even before confirmation"  # one in a thousand in a soak
    text = page([*rows(found), [1, 0, 2]])
    assert text.startswith(f"{found.total + 1:,} implementation-cases, ") and f"| {name} | row | fp32 |" in text
    assert " 2 false alarms" in text


def test_the_draws_are_different_cases():
    """Hypothesis follows a fresh example by mutated copies; most draws of a soak must be fresh."""
    cases = list(drawn("policy", 120, 1))
    assert len({c.id for c in cases}) == 120
    assert len({c.seed for c in cases}) > 60
    assert len({c.settings.get("loss_type", "grpo") for c in cases}) == 8
    assert [c.id for c in drawn("policy", 120, 1)] == [c.id for c in cases]


TIED = {"head": "tied", "mode": "eval", "accumulation": 2, "steps_per_generation": 2, "peak": 12.0, "ref": "far"}
OVERFLOWING = {"B": 5, "H": 100, "T": 7, "V": 129, "advantages": "token", "beta": 0.5, "cotangent": "scaled",
               "delta": 1.8, "epsilon": 0.3, "grad": "weight", "max_completion_length": 7, "softcap": 40.5,
               "targets": "likely", "bias": "random", "loss_type": "dapo", "other_tokens": 100}  # fmt: skip
EQUAL = {"B": 4, "H": 15, "T": 11, "V": 1025, "advantages": "equal", "bias": "random", "cotangent": "ones",
         "entropy_coef": 0.01, "epsilon_high": 0.28, "importance_sampling_level": "sequence", "logit_scale": 2.5,
         "off_policy_mask_threshold": 0.1, "old": "absent", "temperature": 2.0}  # fmt: skip


MANY_PARTS = {"B": 1, "H": 1, "T": 1030, "V": 40, "bias": "random", "cotangent": "ones", "entropy": "value",
              "grad": "weight bias", "peak": 50.0, "softcap": 50.0, "targets": "likely", "temperature": 0.7}  # fmt: skip


SMALL_KL = {"H": 1, "T": 300, "V": 40, "beta": 0.5, "cotangent": "ones", "loss_type": "luspo", "old": "extreme",
            "logit_scale": 0.3, "peak": 12.0, "targets": "edge", "temperature": 0.5}  # fmt: skip

KL_ALONE = {"B": 1, "H": 2, "T": 1030, "V": 33, "beta": 0.5, "bias": "random", "cotangent": "ones", "epsilon_high": 0.5,
            "head_dtype": "fp32", "holes": True, "ids_dtype": "int32", "importance_sampling_level": "sequence",
            "layouts": "flat", "loss_type": "vespo", "mask_dtype": "fp32", "max_completion_length": 512, "peak": 0.05,
            "sampler": "given", "temperature": 0.08099, "vespo_k_pos": 1.0, "vespo_lambda_pos": 1.5}  # fmt: skip
FAR_TARGET = {"B": 3, "H": 257, "T": 1, "V": 168, "beta": 0.0, "bias": "banned", "chunk_size": 3, "cotangent": "ones",
              "grad": "hidden", "layouts": "mixed", "peak": 50.0, "tail": False, "teacher_H": 13,
              "temperature": 0.002586}  # fmt: skip

SMALL_TERMS = {"B": 1, "T": 2, "V": 131073, "H": 1, "peak": 4.0, "targets": "edge", "softcap": 43.0, "bias": "random",
               "head_dtype": "fp32", "ids_dtype": "int32", "layouts": "mixed", "entropy": "gradient"}  # fmt: skip
ADAPTER = {"B": 4, "T": 7, "V": 233, "accumulation": 2, "advantages": "equal", "bias": "random", "cotangent": "scaled",
           "epsilon_high": 5.0, "head": "lora", "layout": "transposed", "logit_scale": 0.3, "loss_type": "cispo",
           "mode": "eval", "peak": 12.0, "sampler": "nan", "steps_per_generation": 4}  # fmt: skip


SATURATED = {"B": 1, "H": 2, "T": 1030, "V": 40, "beta": 0.75, "gap": "near", "grad": "weight", "layout": "transposed",
             "level": 150.0, "peak": 50.0, "softcap": 9.0, "targets": "edge", "teacher_H": 64, "teacher_bias": "banned",
             "teacher_logit_scale": 0.3, "teacher_peak": 12.0, "teacher_softcap": 30.0}  # fmt: skip
PADDED_ROWS = {"B": 1, "H": 2, "T": 2, "V": 16385, "entropy": "gradient", "padded_rows": "zero", "peak": 4.0,
               "temperature": 0.9}  # fmt: skip
COARSE_TEMPERATURE = {"B": 3, "H": 2, "T": 400, "V": 40, "accumulation": 5, "advantages": "negative", "beta": 0.04,
                      "entropy_quantile": True, "epsilon": 0.05, "epsilon_high": 2.0, "grad": "weight", "head": "tied",
                      "importance_sampling_level": "sequence", "lengths": [165, 153, 91], "logit_scale": 0.3,
                      "loss_type": "cispo", "max_completion_length": 512, "mode": "eval", "peak": 12.0,
                      "off_policy_mask_threshold": 0.1, "ratio": "sequence", "ratio_range": "wide",
                      "steps_per_generation": 10, "temperature": 0.004159, "use_bias_correction_kl": True}  # fmt: skip
EQUAL_TOKENS = {"B": 2, "T": 300, "V": 33, "H": 1, "level": 150.0, "peak": 4.0, "temperature": 0.9}
ONE_WEIGHT = {"H": 1, "T": 300, "V": 40, "peak": 12.0, "targets": "likely", "temperature": 0.9808}
LAST_PART_FIRST = {"H": 2, "T": 300, "V": 40, "advantages": "repeated", "beta": 0.5, "bias": "random", "lengths": [199, 134],
                   "loss_type": "sapo", "old": "absent", "other_tokens": 100, "peak": 0.05, "ratio": "sequence",
                   "ratio_range": "zeros", "ref": "apart", "sampler": "old", "targets": "edge"}  # fmt: skip
ONE_KERNEL = {"B": 1, "H": 16, "T": 2, "V": 4097, "bias": "banned", "chunk_size": 64, "context": "checkpoint",
              "cotangent": "fine", "layouts": "mixed", "logit_scale": 0.0625, "padded_rows": "equal", "peak": 12.0,
              "softcap": 1.0}  # fmt: skip
EQUAL_ROWS = {"B": 1, "T": 2, "V": 5461, "ids_dtype": "int32", "padded_rows": "equal", "peak": 0.05}
BESIDE_A_TARGET = {"H": 33, "T": 1, "V": 8193, "advantages": "repeated", "beta": 0.04, "bias": "banned", "chunk_size": 2,
                   "cotangent": "fine", "entropy_coef": 0.01, "epsilon": 0.0, "layout": "flat", "layouts": "mixed",
                   "loss_type": "vespo", "mask_dtype": "fp32", "off_policy_mask_threshold": 0.0, "old": "absent",
                   "padded_rows": "equal", "peak": 0.05, "ratio": "token", "ratio_range": "wide",
                   "recording": "gemma2-bf16-t0.7-p0.8", "ref": "far", "sampler": "old", "targets": "likely",
                   "vespo_k_neg": 1.5, "vespo_k_pos": 1.0, "vespo_lambda_neg": 1.0, "vespo_lambda_pos": 1.5}  # fmt: skip
IN_TURN = {"B": 1, "H": 130, "T": 1030, "V": 40, "cotangent": "ones", "grad": "weight", "head_dtype": "fp32",
           "ids_dtype": "int32", "layout": "strided", "layouts": "offset", "level": -150.0, "logit_scale": 0.0625,
           "padded_rows": "zero", "peak": 4.0}  # fmt: skip
BEGINS_WITH_THE_BIAS = {"H": 300, "T": 9, "V": 257, "bias": "banned", "chunk_size": 1000, "cotangent": "small",
                        "grad": "hidden", "layouts": "mixed", "peak": 0.05, "softcap": 30.0,
                        "temperature": 0.03527}  # fmt: skip

ONE_ACCUMULATOR = {"B": 1, "H": 4, "T": 2, "V": 1023, "entropy": "gradient", "padded_rows": "equal"}
STORED_LOG_SUM_EXP = {"H": 64, "T": 6, "V": 255, "bias": "random", "cotangent": "scaled", "ignored": "some",
                      "layout": "transposed", "logit_scale": 0.3, "peak": 50.0, "softcap": 35.0,
                      "temperature": 0.9}  # fmt: skip

ORDERS_OF_MAGNITUDE = {"H": 16, "T": 2, "V": 4097, "advantages": "zero", "bias": "random", "chunk_size": 2,
                       "cotangent": "ones", "epsilon": 0.3, "epsilon_high": 0.28, "grad": "weight", "holes": True,
                       "ids_dtype": "int32", "layout": "transposed", "layouts": "expanded", "level": 150.0,
                       "loss_type": "bnpo", "mask_dtype": "bool", "padded_rows": "equal", "sampler": "nan",
                       "sapo_temperature_neg": 2.0, "temperature": 0.05671, "use_bias_correction_kl": True,
                       "vespo_lambda_neg": 1.0, "vespo_lambda_pos": 1.5}  # fmt: skip
ROUNDED_APART = {"H": 130, "V": 4160, "bias": "banned", "chunk_size": 64, "context": "autocast", "entropy": "value",
                 "grad": "hidden bias", "ignored": "some", "level": 150.0, "logit_scale": 0.3,
                 "targets": "likely"}  # fmt: skip
FLAT = {"B": 1, "H": 3, "T": 2, "V": 1025, "peak": 0.05}


@pytest.mark.parametrize(
    "case",
    [
        Case("policy", 163, "fp16", TIED | OVERFLOWING),
        Case("policy", 387, "bf16", TIED | EQUAL),
        Case("logprobs", 187473, "fp16", MANY_PARTS),
        Case("policy", 7794, "bf16", SMALL_KL),
        Case("policy", 20, "bf16", KL_ALONE),
        Case("divergence", 362880, "fp16", FAR_TARGET),
        Case("policy", 306, "fp16", ADAPTER),
        Case("logprobs", 8657, "bf16", SMALL_TERMS),
        Case("divergence", 1512, "fp32", SATURATED),
        Case("logprobs", 999308, "fp32", PADDED_ROWS),
        Case("policy", 59720, "fp32", COARSE_TEMPERATURE),
        Case("divergence", 21, "fp32", EQUAL_TOKENS),
        Case("logprobs", 65895, "fp32", EQUAL_ROWS),
        Case("logprobs", 2574, "fp32", ONE_KERNEL),
        Case("logprobs", 530, "bf16", ONE_WEIGHT),
        Case("policy", 2316, "bf16", LAST_PART_FIRST),
        Case("policy", 1901, "fp32", BESIDE_A_TARGET),
        Case("logprobs", 0, "fp16", IN_TURN),
        Case("logprobs", 1502, "fp32", BEGINS_WITH_THE_BIAS),
        Case("logprobs", 1, "fp32", ONE_ACCUMULATOR),
        Case("logprobs", 128, "fp16", STORED_LOG_SUM_EXP),
        Case("policy", 6635, "bf16", ORDERS_OF_MAGNITUDE),
        Case("logprobs", 1, "fp32", FLAT),
        Case("logprobs", 12, "fp32", FLAT),
        Case("logprobs", 74895, "fp32", ROUNDED_APART),
    ],
    ids=[
        "one use of a tied head overflows",
        "equal gradients round alike",
        "258 partial gradients of one sign",
        "a KL of 4e-8",
        "a loss of 2e-8 that is its KL",
        "a log-prob of -66,534",
        "one of two products with the same states overflows",
        "a sum loses a hundred thousand small terms",
        "a softcap at its bound rounds alike",
        "five thousand equal terms below the largest",
        "one rounding of a temperature for 409 tokens",
        "every token the same",
        "1,820 equal rows of the head",
        "one kernel adds equal terms in turn, another in lanes",
        "one weight rounds all its products alike",
        "300 partial gradients, the last one first",
        "one backward pass adds equal terms of the entropy to the target's",
        "1,030 equal terms, for five rows of the head at a time",
        "the product of two tokens adds 300 terms to the bias",
        "a log-softmax along another dimension than the last has one accumulator",
        "the log-sum-exp is stored in float16, and so are the probabilities",
        "rounded logits move gradients by thirteen orders of magnitude",
        "the maximum of a log-sum-exp carries a gradient",
        "each running maximum carries one",
        "logits of two tokens that nearly always round together",
    ],
)
def test_cases_that_alarmed(case):
    found = soak([case])
    assert not found.alarms and found.total >= 4, found.alarms
