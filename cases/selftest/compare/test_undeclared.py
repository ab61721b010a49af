"""A function that rounds to 16 bits without saying so is told what to declare; one that is wrong is not."""

import dataclasses

import pytest
import torch
from torch.nn.functional import linear

from parity.case.case import Case
from parity.compare.one_case import run_case
from parity.implementations.user import from_function
from parity.judge.recipe import Recipe
from parity.registry import loss_family

LOGPROBS = loss_family("logprobs")
CASES = [
    Case("logprobs", 3, "bf16", {"B": 2, "H": 16, "T": 40, "V": 40, "peak": 4.0}),
    Case("logprobs", 3, "bf16", {"B": 1, "H": 4, "T": 4, "V": 7, "peak": 12.0, "targets": "likely"}),
]


def chosen(logps, ids):
    return logps.gather(-1, ids.unsqueeze(-1)).squeeze(-1)


def wide(hidden, weight, ids):
    return chosen(linear(hidden, weight).float().log_softmax(-1), ids)


def narrow(hidden, weight, ids):
    return chosen(linear(hidden, weight).log_softmax(-1), ids)


def gathered(hidden, weight, ids):
    z = linear(hidden, weight)
    return chosen(z, ids) - z.logsumexp(-1)


def tiles(hidden, weight, ids):
    """float32, a token at a time: autograd adds 80 gradients of the head in its dtype."""
    pairs = zip(hidden.flatten(0, 1).split(1), ids.flatten().split(1), strict=True)
    parts = [chosen(linear(h.float(), weight.float()).log_softmax(-1), i) for h, i in pairs]
    return torch.cat(parts).view(ids.shape)


def too_large(hidden, weight, ids):
    return 1.05 * narrow(hidden, weight, ids)


MANY_TOKENS = [Case("logprobs", 5, "bf16", {"B": 1, "H": 4, "T": 300, "V": 7, "peak": 4.0, "targets": "likely"})]


def messages(function, recipe=None, cases=CASES):
    implementation = from_function(function, f"here.py:{function.__name__}", [LOGPROBS])
    if recipe is not None:
        implementation = dataclasses.replace(implementation, recipe=lambda x: recipe)
    rows = [r for case in cases for r in run_case(LOGPROBS, case, [implementation], thorough=False)]
    assert any(r.judged for r in rows)
    return [r.message for r in rows if r.failing]


LOGITS = {"logits": "input", "dlogits": "input"}
SOFTMAX = LOGITS | {"softmax": "input"}
GATHERED = SOFTMAX | {"log_sum_exp": "input"}


@pytest.mark.parametrize("function, fields", [(wide, LOGITS), (narrow, SOFTMAX), (gathered, GATHERED)])
def test_what_a_function_does_not_declare_is_named_and_explains_it(function, fields):
    named = "Recipe(" + ", ".join(f"{k}={v!r}" for k, v in fields.items()) + ")"
    found = messages(function)
    assert sum(named in text for text in found) == len(CASES), found
    assert messages(function, Recipe(**fields, output="any")) == []


def test_partial_sums_in_16_bits_are_named():
    found = messages(tiles, cases=MANY_TOKENS)
    assert any("Recipe(accumulate='input', partials=64)" in text for text in found), found
    assert messages(tiles, Recipe(accumulate="input", partials=300, output="any"), cases=MANY_TOKENS) == []


def test_no_recipe_is_named_for_what_is_wrong():
    found = messages(too_large)
    assert found and not any("Recipe(" in text for text in found)


def with_entropy(factor=1.0):
    def unshifted(hidden, weight, ids, temperature=1.0, entropy="none"):
        """L - Σ p·z of logits as they come, in float32, as a kernel that keeps L for its second pass has it."""
        z = hidden.float() @ weight.float().T / temperature
        total = z.logsumexp(-1, keepdim=True)
        found = total.squeeze(-1) - factor * ((z - total).exp() * z).sum(-1)
        return chosen(z - total, ids), found if entropy == "gradient" else found.detach()

    unshifted.outputs = ("entropy",)
    return unshifted


def test_an_entropy_of_logits_that_are_not_shifted_is_weak_and_no_logic_error():
    settings = {"B": 1, "H": 2, "T": 5, "V": 80, "entropy": "gradient", "peak": 50.0, "temperature": 1.2}
    case = Case("logprobs", 327, "fp32", settings)

    def failing(function, recipe=None):
        implementation = from_function(function, "here.py:unshifted", [LOGPROBS])
        if recipe is not None:
            implementation = dataclasses.replace(implementation, recipe=lambda x: recipe)
        return [r for r in run_case(LOGPROBS, case, [implementation], thorough=False) if r.failing]

    rows = failing(with_entropy())
    assert rows[0].quantity == "entropy" and {r.cls for r in rows} == {"precision"}
    assert "Recipe(entropy='unshifted')" in rows[0].message
    assert failing(with_entropy(), Recipe(entropy="unshifted", output="any")) == []
    assert "logic" in {r.cls for r in failing(with_entropy(1.001), Recipe(entropy="unshifted", output="any"))}
