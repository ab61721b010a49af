"""Oracle and replicas on the device of a large case are the CPU's."""

import pytest
import torch

from fixtures.pretended_cuda import pretended
from parity.judge.recipe import Recipe
from parity.judging import assess
from parity.judging.assess import CaseOracle
from parity.registry import family

CASES = [
    ("logprobs", {"V": 9, "softcap": 3.0, "entropy": "gradient", "ignored": "some", "bias": "banned"}),
    ("policy", {"V": 9, "beta": 0.04, "lengths": [3, 1]}),
    ("divergence", {"V": 9, "beta": 0.5, "temperature": 0.9}),
]


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_on_the_device_as_on_the_cpu(name, settings, monkeypatch):
    fam, recipe = family(name), Recipe(logits="bf16", dlogits="bf16", accumulate="bf16", partials=4)
    case = fam.case(3, "bf16", settings)
    here = CaseOracle.of(fam, case)
    monkeypatch.setattr(assess, "ON_DEVICE", 1)
    with pretended():
        there = CaseOracle.of(fam, case, "cuda")
        assert there.home.device.type == "cuda"
        pairs = [(there.exact, here.exact), (there.oracle.replicas(recipe, 12), here.oracle.replicas(recipe, 12))]
    for found, right in pairs:
        assert found.keys() == right.keys()
        for quantity, value in found.items():
            assert value.device.type == "cpu" and type(value) is torch.Tensor
            torch.testing.assert_close(value, right[quantity], rtol=1e-12, atol=1e-12, equal_nan=True)
