"""Recipes say where an implementation stores something narrow, and no more: what is stored wide is not expected narrow."""

from parity.case.case import Case
from parity.registry import run_case, select

DIVERGENCE = {"B": 1, "T": 2, "V": 32769, "H": 1, "peak": 0.05, "targets": "likely", "softcap": 10.5, "logit_scale": 0.3,
              "bias": "random", "head_dtype": "fp32", "beta": 1.0, "teacher_H": 13, "gap": "near", "teacher_peak": 4.0,
              "teacher_softcap": 3.0, "teacher_logit_scale": 2.5, "num_items": "given"}  # fmt: skip


def test_a_float32_gradient_of_a_head_that_is_cast_does_not_lose_what_float16_cannot_hold():
    rows = [
        r
        for seed in range(4)
        for r in run_case(Case("divergence", seed, "fp16", DIVERGENCE), select(["trl.ChunkedDivergenceFunction"]))
    ]
    assert {r.quantity for r in rows} >= {"grad_weight", "grad_bias"}
    assert not [(r.quantity, r.gate, r.headroom) for r in rows if r.verdict == "disagree"]
