"""The error of each token in the row of a quantity that fails: a sign for each, another alphabet under the mask."""

import torch

from cases.selftest.oracles import oracle_of
from parity.implementations.implementation import Implementation
from parity.registry import family, run_case

FAMILY = family("logprobs")
CASE = FAMILY.case(3, "fp32", {"B": 2, "T": 4, "V": 9, "H": 4, "ignored": "some"})


def row(wrong):
    """That of log-probs of which some are off."""

    def loss(x):
        right = torch.log_softmax(x.hidden.float() @ x.weight.float().T, -1)
        return {"logps": wrong(right.gather(-1, x.ids.clamp(min=0)[..., None])[..., 0] * (x.ids >= 0))}

    found = run_case(CASE, [Implementation("off", "logprobs", "candidate", loss)], thorough=False)
    return next(one for one in found if one.quantity == "logps")


def test_a_sign_for_each_token():
    masked = oracle_of(CASE).inputs.ids < 0
    assert masked.any() and not masked.all()
    size = torch.tensor([[0.0, 8.0, 3.99, 3.9], [1.0, 1e-9, torch.nan, 7.9]]).where(~masked, 8.0)
    # a rounding error of the first is no 0
    expected = torch.tensor([[1, 9, 8, 8], [6, 1, 9, 9]]).where(~masked, 9) + 10 * masked
    found = row(lambda logps: logps + size.to(logps))
    assert found.tokens == ["".join("0123456789abcdefghij"[n] for n in line) for line in expected.tolist()]


def test_what_agrees_has_none_nor_another_shape_and_another_dtype_has_them():
    found = row(lambda logps: logps)
    assert found.verdict == "agree" and not found.tokens
    assert row(lambda logps: logps[:, :2] + 1).tokens == []
    assert [len(line) for line in row(lambda logps: 1.5 * logps.double()).tokens] == [4, 4]
