"""What a filter drops, by its definition and as run, and the picture of it."""

import dataclasses

import pytest
import torch

from parity.registry import loss_family
from parity.selftest.controls import control
from parity.tools import filtering


def test_a_block_whose_largest_entry_is_below_the_limit_is_dropped_and_no_other():
    """Two tokens that are certain of token 0, and 129 vocabulary entries below it: a block of 128, and one with token 0."""
    fam = loss_family("logprobs")
    x = fam.build(fam.case(1, "bf16", {"B": 1, "T": 2, "V": 256, "H": 4}))
    weight = torch.zeros(256, 4)
    weight[:128, 0], weight[0, 0], weight[:, 1] = 1.0, 8.0, 1.0
    hidden = torch.tensor([[[2.0, 0.0, 0.0, 0.0]] * 2])
    x = x.replace(hidden=hidden.bfloat16(), weight=weight.bfloat16(), ids=torch.full((1, 2), 1))
    p = (hidden[0, 0] @ weight.mT).softmax(-1)
    assert float(p[128:].max()) < 2.0**-12 and float(p[0]) > 0.9
    d = p - torch.nn.functional.one_hot(torch.tensor(1), 256)
    expected = float((d[128:] @ weight[128:]).norm() / (d @ weight).norm()), float(d[128:].norm() / d.norm())
    assert filtering.by_definition(x) == pytest.approx(expected, rel=1e-3) and expected[1] > 0


def test_as_run():
    whole = control("honest.logprobs.plain")
    half = dataclasses.replace(whole, call=lambda x: {"logps": 0.5 * whole.call(x)["logps"]})
    fam = loss_family("logprobs")
    assert filtering.as_run(fam.build(fam.case(1, "fp32", {"V": 9})), [half, whole]) == pytest.approx(0.5)


def test_the_picture_and_the_table():
    found = [filtering.DroppedShare("bf16", 128_256, peak, peak / 10, 0.25, None) for peak in (1.0, 4.0)]
    drawn, written = filtering.svg(found), filtering.page(found, "python -m x")
    assert 'points="64.0,187.5 314.0,60.0"' in drawn and "V = 128,256" in drawn
    assert "| bf16 | 128,256 | 4 | 40.00% | 25.00% |  |" in written and "not run on CUDA" in written
    assert "as run there" in filtering.page([found[0]._replace(ran=0.5)], "x")
