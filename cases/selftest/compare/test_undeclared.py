"""A function that rounds to 16 bits without saying so is told what to declare; one that is wrong is not."""

import functools
import re

import pytest
import torch
from torch.nn.functional import linear

from parity.case.case import Case
from parity.implementations.user import from_function
from parity.judge.recipe import Recipe
from parity.registry import loss_family, run_case
from parity.results.report.findings import suggested
from parity.results.row import Row

LOGPROBS = loss_family("logprobs")


def chosen(logps, ids):
    return logps.gather(-1, ids.unsqueeze(-1)).squeeze(-1)


def wide(hidden, weight, ids):
    return chosen(linear(hidden, weight).float().log_softmax(-1), ids)


def narrow(hidden, weight, ids):
    return chosen(linear(hidden, weight).log_softmax(-1), ids)


def gathered(hidden, weight, ids):
    z = linear(hidden, weight)
    return chosen(z, ids) - z.logsumexp(-1)


def too_large(hidden, weight, ids):
    return 1.05 * narrow(hidden, weight, ids)


class Kernel(torch.autograd.Function):
    """float32 inside but for one buffer: what `narrow` names is rounded to bfloat16."""

    @staticmethod
    def forward(ctx, hidden, weight, ids, narrow):
        logps = buffer(linear(hidden.float(), weight.float()), narrow == "logits").log_softmax(-1)
        ctx.save_for_backward(hidden, weight, ids, logps)
        ctx.narrow = narrow
        return chosen(logps, ids)

    @staticmethod
    def backward(ctx, g):
        hidden, weight, ids, logps = ctx.saved_tensors
        dz = (torch.nn.functional.one_hot(ids, len(weight)) - logps.exp()) * g.float().unsqueeze(-1)
        dz = buffer(dz, ctx.narrow == "dlogits")
        grad = torch.zeros_like(weight, dtype=torch.float32)
        for z, h in zip(dz.split(10, 1), hidden.split(10, 1), strict=True):
            part = torch.einsum("btv,bth->vh", z, h.float())
            grad = buffer(grad + buffer(part, ctx.narrow == "sums"), ctx.narrow == "sums")
        return (dz @ weight.float()).to(hidden.dtype), grad.to(weight.dtype), None, None


def buffer(x, narrow):
    return x.bfloat16().float() if narrow else x


def kernel(narrow):
    return lambda hidden, weight, ids: Kernel.apply(hidden, weight, ids, narrow)


def cast(hidden, weight, ids):
    return chosen(linear(hidden.bfloat16().float(), weight.bfloat16().float()).log_softmax(-1), ids)


def wrong_in_one(hidden, weight, ids):
    return kernel("logits")(hidden, weight, ids) * (1.0 if ids.shape[1] > 4 else 3.0)


SHORT = {"B": 1, "H": 4, "T": 4, "V": 7, "peak": 12.0, "targets": "likely"}
LONG = {"B": 1, "H": 8, "T": 90, "V": 17, "peak": 4.0}
NARROW = [Case("logprobs", 3, "bf16", SHORT), Case("logprobs", 3, "bf16", LONG)]
PEAKED = [Case("logprobs", 3, "bf16", size | {"peak": 20.0}) for size in (SHORT, LONG)]
CASES = [Case("logprobs", 3, "fp32", SHORT), Case("logprobs", 5, "fp32", LONG), *NARROW]


def failing(function, cases, recipe=None):
    @functools.wraps(function)
    def declared(*given, **more):
        return function(*given, **more)

    if recipe is not None:
        declared.recipe = recipe
    implementation = from_function(declared, "here.py:declared", [LOGPROBS])
    rows = [r for case in cases for r in run_case(case, [implementation], thorough=False)]
    assert any(r.judged for r in rows)
    return [r for r in suggested(rows) if r.failing]


def named(rows):
    return {found[0] for r in rows if (found := re.search(r"Recipe\(.*\)", r.message))}


@pytest.mark.parametrize(
    "function, cases, expected",
    [
        (wide, NARROW, "logits='input'"),
        (narrow, NARROW, "softmax='input'"),
        (gathered, PEAKED, "log_sum_exp='input'"),
        (cast, CASES, "inputs='bf16'"),
        (kernel("logits"), CASES, "(logits)='bf16'"),
        (kernel("dlogits"), CASES, "dlogits='bf16'"),
        (kernel("sums"), CASES, "accumulate='bf16'"),
    ],
)
def test_what_a_function_rounds_undeclared_is_named_and_turns_every_case_green(function, cases, expected):
    rows = failing(function, cases)
    assert not any("times the definition" in r.message and r.dtype == "fp32" for r in rows)
    (found,) = named(rows)
    print(found)
    assert re.search(expected, found)
    assert failing(function, cases, eval(found)) == []


@pytest.mark.parametrize("function", [too_large, wrong_in_one])
def test_no_recipe_is_named_that_does_not_explain_every_case(function):
    rows = failing(function, CASES)
    assert rows and not named(rows)


def one_token_off(hidden, weight, ids):
    """By less than a log-sum-exp in bfloat16 is; every other token is right."""
    out = wide(hidden.float(), weight.float(), ids)
    return out + torch.zeros_like(out).index_fill(-1, torch.tensor([out.shape[-1] // 2]), 0.01)


def test_one_wrong_token_is_no_rounding():
    rows = failing(one_token_off, [Case("logprobs", 5, "fp32", LONG)])
    assert rows and not named(rows)


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
    cases, weak = [Case("logprobs", 327, "fp32", settings)], Recipe(entropy="unshifted", output="any")
    rows = failing(with_entropy(), cases)
    assert rows[0].quantity == "entropy" and {r.cls for r in rows} == {"precision"}
    assert "Recipe(entropy='unshifted')" in rows[0].message
    assert failing(with_entropy(), cases, weak) == []
    assert "logic" in {r.cls for r in failing(with_entropy(1.001), cases, weak)}


def test_a_recipe_is_said_in_the_rows_that_it_explains_alone():
    about = {"implementation": "f.py:f", "family": "logprobs", "dtype": "bf16", "device": "cpu", "quantity": "logps"}
    found = {"new": {"recipes": ["Recipe(a)"]}, "known": {"recipes": ["Recipe(b)"], "known": "an-entry"}}
    found |= {"both": {"recipes": ["Recipe(b)"], "blame": "both"}, "none": {"known": "an-entry"}}
    rows = [Row(case=case, verdict="disagree", **about, **fields) for case, fields in found.items()]
    assert {row.case for row in suggested(rows) if "Recipe(a)" in row.message} == {"new"}


def test_no_rounding_to_16_bits_explains_what_is_wrong_in_float32_too():
    about = {"implementation": "f.py:f", "family": "policy", "device": "cpu", "quantity": "loss"}
    recipe = {"verdict": "disagree", "recipes": ["Recipe(softmax='bf16')"]}

    def told(cls, dtype, *more, **settings):
        first = Row(case="a", cls=cls, dtype=dtype, settings={"B": 1} | settings, **about, **recipe)
        return ["Recipe" in row.message for row in suggested([first, *more])]

    assert told("precision", "bf16") == [True]
    seen = Row(case="c", dtype="fp32", verdict="agree", **about)
    assert told("logic", "bf16", seen) == [False, False] == told("logic", "fp32", seen, context="autocast")
    assert told("logic", "bf16") == [True], "no case of the run is in float32"
    assert told("logic", "fp32") == [True], "a buffer in bfloat16, whatever the inputs"
    fp32 = {"case": "b", "cls": "logic", "dtype": "fp32", **about}
    assert told("logic", "bf16", Row(**fp32, **recipe)) == [True, True]
    assert told("logic", "bf16", Row(**fp32, **recipe, blame="both")) == [False, False]
