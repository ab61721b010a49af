"""The log-prob oracle against the definition in 50 digits, and a stored fp16 that overflows."""

import itertools

import mpmath as mp
import pytest
import torch

from cases.selftest.families.written_out import Values, differences, drawn
from parity.families import head
from parity.families.logprobs import RARE, RARE_BLOCK
from parity.judging.oracle import exact, to_double
from parity.registry import family

FAMILY = family("logprobs")


def inputs(number):
    return drawn("logprobs", 64, rare=(None,), smoothing=(0.0, 0.0, 0.1, 0.0, 1.0), z_loss=(0.0, 0.3, 0.0, 1e-4))[
        number
    ]


@pytest.mark.parametrize("number", range(64))
def test_values(number):
    x = inputs(number)
    found = exact(FAMILY, x)
    for name, wanted in zip(("logps", "entropy")[: 1 + ("entropy" in found)], Values(x).tokens(), strict=False):
        for value, truth in zip(found[name].flatten().tolist(), itertools.chain(*wanted), strict=True):
            assert abs(value - truth) <= mp.mpf("1e-10") * (1 + abs(truth)), name


@pytest.mark.parametrize("number", range(24))
def test_gradient(number):
    """Central differences in 50 digits of Σ cotangent·output."""
    x = inputs(number)
    values, found = Values(x), exact(FAMILY, x)
    names = [n for n in ("logps", "entropy") if n in x.cotangents]
    upstream = [[mp.mpf(float(v)) for v in x.cotangents[n].flatten()] for n in names]

    def total():
        outputs = [itertools.chain(*o) for o in values.tokens()]
        return mp.fsum(g * v for g, o in zip(upstream, outputs, strict=False) for g, v in zip(g, o, strict=True))

    for name, value, slope, largest in differences(values.leaf, found, x.leaves, number, total):
        assert abs(value - slope) <= mp.mpf("1e-10") * (abs(slope) + largest + 1), name


@pytest.mark.parametrize("head_dtype", ["same", "fp32"])
@pytest.mark.parametrize("rare", RARE)
def test_a_rare_block_has_the_probability_it_is_asked_for(rare, head_dtype):
    """The largest of each block beyond the first, over all tokens, in the dtype's own rounding of the head; no token is in it."""
    settings = {"V": 384, "H": 5, "T": 4, "peak": 1.0, "rare": rare, "head_dtype": head_dtype}
    x = FAMILY.build(FAMILY.case(3, "fp16", settings))
    p = (x.hidden.double() @ x.weight.double().T).softmax(-1).flatten(0, 1)
    for k in (1, 2):
        largest = float(p[:, k * RARE_BLOCK : (k + 1) * RARE_BLOCK].max())
        assert abs(largest * rare / torch.finfo(torch.float16).eps - 1) < 0.04
    assert int(x.ids.max()) < RARE_BLOCK


def test_autocast_to_float16_has_the_loss_scale_of_float16():
    scaled = {"cotangent": "scaled"}
    cases = FAMILY.case(1, "fp16", scaled), FAMILY.case(1, "fp32", scaled | {"context": "autocast_fp16"})
    assert torch.equal(*(FAMILY.build(case).cotangents["logps"] for case in cases))


def test_a_softcap_leaves_no_logit_infinite():
    """Where a ledger entry for logits of -inf must not reach: the oracle's logits say the same."""
    for softcap, temperature, infinite in ((None, 1.0, True), (5.0, 1.0, False)):
        settings = {"bias": "banned", "softcap": softcap, "temperature": temperature}
        case = FAMILY.case(3, "fp32", settings)
        assert bool(head.logits(to_double(FAMILY.build(case))).isinf().any()) is infinite
        assert FAMILY.features(case)["a log-prob of -inf"] is infinite
    for softcap, temperature, infinite in ((None, 0.01, True), (5.0, 0.01, False), (400.0, 0.01, True)):
        settings = {"level": 150.0, "logit_scale": 16.0, "softcap": softcap, "temperature": temperature}
        assert FAMILY.features(FAMILY.case(3, "fp16", settings))["a log-prob of -inf"] is infinite


def test_one_upstream_gradient_of_one_is_not_all():
    """A backward that leaves out its product where the largest upstream gradient is 1 is wrong of a masked sum."""
    case = FAMILY.case(3, "fp32", {"B": 2, "T": 8, "cotangent": "sparse"})
    given = FAMILY.build(case).cotangents["logps"]
    assert given.max() == 1 == given.sum()


def test_a_bias_is_0_at_some_seeds():
    """A backward that leaves out a bias of zeros is right at no other."""
    for seed in range(16):
        bias = FAMILY.build(FAMILY.case(seed, "fp32", {"bias": "random"})).tensors["bias"]
        assert bool(bias.any()) == (seed % 8 != 5)
