"""The shipped definitions: right implementations of several styles agree on drawn inputs, and hold the protocol."""

import dataclasses
import inspect
import itertools
import math

import pytest
import torch
import torch.nn.functional as F

from cases.selftest.judge.operations import OPERATIONS
from cases.selftest.judge.test_kernels import on_outputs
from parity.judge.operations import NO_DIGIT
from parity.testing import check_parity, definitions

STYLES = [(name, style) for name, operation in OPERATIONS.items() for style in operation.all_styles()]


def judged(name, style, count, seed):
    operation = OPERATIONS[name]
    drawn = dataclasses.replace(operation.drawn, seed=seed)
    if style.startswith("fp32"):
        drawn = dataclasses.replace(drawn, dtypes=("fp32",))
    for case in drawn.cases(count):
        yield case, case.check_parity(operation.all_styles()[style], operation.definition)


def without_a_digit(name, style, case):
    """torch's flash kernel makes exp(s - L) again backward: there it gives NaN, or 0 as the weight of a single key."""
    if not (name.startswith("attention") and style == "torch"):
        return False
    q, k = (case.inputs[n].double() for n in "qk")
    scores = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT / q.shape[-1] ** 0.5
    if case.inputs["causal"]:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
    return float(scores.logsumexp(-1).abs().amax()) > NO_DIGIT


@pytest.mark.parametrize(("count", "seed"), [(4, 0), pytest.param(300, 7, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("name", "style"), STYLES)
def test_right_code_agrees(name, style, count, seed):
    found = judged(name, style, count, seed)
    wrong = [(case, parity) for case, parity in found if not parity.agrees]
    assert [(str(case), parity.message) for case, parity in wrong if not without_a_digit(name, style, case)] == []


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_factor_of_a_hundredth_does_not(name):
    operation = OPERATIONS[name]
    off = on_outputs(lambda o: o * 1.01)(operation.all_styles()["wide"])
    cases = (case for case in operation.drawn.cases(12) if case.dtype == "fp32")
    assert not all(case.check_parity(off, operation.definition).agrees for case in cases)


def one_pass(x, weight, bias, groups=None):
    """With E[x²] - E[x]²: far from 0 off by thousands of times as much as torch's kernels."""
    whole = x.unflatten(1, (groups, -1)).flatten(2) if groups else x
    mean, square = whole.mean(-1, keepdim=True), whole.square().mean(-1, keepdim=True)
    normal = (whole - mean) * torch.rsqrt((square - mean.square()).clamp(min=0) + 1e-5)
    across = (-1, 1) if groups else (-1,)
    return normal.reshape(x.shape) * weight.view(across) + bias.view(across)


@pytest.mark.parametrize(("name", "more"), [("layer_norm", {}), ("group_norm", {"groups": 4})])
def test_a_variance_in_one_pass_is_declared(name, more):
    """The other form of both definitions had a variance as imprecise."""
    operation = OPERATIONS[name]
    shape = (4, 8, 8) if more else (4, 8)
    far = {
        "x": 1000 + torch.arange(float(math.prod(shape))).sin().view(shape),
        "weight": torch.ones(8),
        "bias": torch.zeros(8),
        **more,
    }
    assert not check_parity(one_pass, operation.definition, far).agrees
    assert check_parity(one_pass, operation.definition, far, also=(one_pass,)).agrees
    assert check_parity(operation.styles["fp32 torch"], operation.definition, far).agrees
    drawn = [case for case in operation.drawn.cases() if case.dtype == "fp32"]
    assert not all(case.check_parity(one_pass, operation.definition).agrees for case in drawn)


def test_a_mean_of_one_entry_is_that_entry():
    """Replicas rounded it, so that this row of one had a spread of 1e8."""
    x, weight, bias = torch.tensor([[-7.5e14]]), torch.ones(1), torch.zeros(1)
    own, given = OPERATIONS["layer_norm"].styles["fp32 torch"], {"x": x, "weight": weight, "bias": bias}
    assert check_parity(own, definitions.layer_norm, given).agrees


def test_every_definition_has_its_source_and_is_judged():
    functions = {
        n: f for n, f in vars(definitions).items() if inspect.isfunction(f) and f.__module__ == definitions.__name__
    }
    public = {n for n in functions if not n.startswith("_")}
    assert all(functions[n].__doc__ for n in public)
    used = {getattr(o.definition, "__name__", o.definition) for o in OPERATIONS.values()}
    used.add("top_k_router")  # in a partial
    forms = {f.__name__ for f in functions.values() for f in getattr(f, "also", ()) if hasattr(f, "__name__")}
    assert public <= used | forms


def test_a_cross_entropy_is_what_torch_computes_in_float64():
    """The other definitions are held against torch's own code in `OPERATIONS`."""
    logits, ids = torch.randn(6, 8, dtype=torch.float64), torch.tensor([0, 3, -100, 7, 1, 1])
    for smoothing, reduction in itertools.product((0.0, 0.1), ("mean", "sum", "none")):
        options = {"label_smoothing": smoothing, "reduction": reduction}
        theirs = torch.nn.functional.cross_entropy(logits, ids, **options)
        assert torch.allclose(definitions.cross_entropy(logits, ids, **options), theirs)


def case_of(name, seed):
    return next(c for c in dataclasses.replace(OPERATIONS[name].drawn, seed=7).cases(300) if c.seed == seed)


@pytest.mark.parametrize(("name", "style", "seed"), [("attention", "online", 81), ("attention", "torch", 15)])
def test_a_kernel_sums_the_upstream_gradient_times_its_output(name, style, seed):
    """Of one key's weight 1, gradients that cancel are 1e11 under keys of 1e15; or products take dS rounded to bf16."""
    case = case_of(name, seed)
    assert case.check_parity(OPERATIONS[name].all_styles()[style], OPERATIONS[name].definition).agrees


def test_weights_without_a_digit_are_wrong():
    """exp(s - L) of another product s, with L = 1e11, is 0 for a single key: replicas made so would allow anything."""
    case = case_of("attention", 116)
    found = case.check_parity(OPERATIONS["attention"].all_styles()["torch"], OPERATIONS["attention"].definition)
    assert not found.agrees and without_a_digit("attention", "torch", case)


@pytest.mark.parametrize("form", [definitions.layer_norm, lambda x, weight, bias: F.layer_norm(x, (65,), weight, bias)])
def test_a_variance_by_a_running_mean_agrees(form):
    """torch's is off by 110 u at a mean of 180 standard deviations, alike in equal rows: a common factor of the gradient."""
    given = {
        "x": (-120 + (torch.arange(65.0) * 1108 * 0.37 + 1108).sin()).expand(64, 65),
        "weight": torch.linspace(0.5, 1.5, 65),
        "bias": torch.zeros(65),
    }
    found = check_parity(lambda x, weight, bias: F.layer_norm(x, (65,), weight, bias), form, given)
    assert found.agrees, found


def test_what_is_not_linear_in_the_weights_is_no_attention():
    """Σ dO·O is then not Σ p·dP: replicas made so had a gradient of that size where there is none."""

    def hard(q, k, v):
        return torch.softmax(4 * q @ k.mT, -1).round() @ v

    def straight_through(q, k, v):
        p = torch.softmax(4 * q @ k.mT, -1)
        return (p + (p.round() - p).detach()) @ v

    torch.manual_seed(0)
    given = {n: torch.randn(2, tokens, 8) for n, tokens in (("q", 6), ("k", 7), ("v", 7))}
    assert check_parity(hard, hard, given).agrees
    found = check_parity(straight_through, hard, given).quantities
    assert min(found[n].headroom for n in ("grad_q", "grad_k")) > 1e6
