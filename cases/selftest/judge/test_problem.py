"""Definitions as problems: their forms, upstream gradients and stacks of replicas."""

import functools
import gc
import math
import weakref

import pytest
import torch
import torch.nn.functional as F

from parity.judge.assertion import verdict
from parity.judge.escalation import FEW
from parity.judge.oracle import Oracle
from parity.judge.problem import Problem, cotangent
from parity.judge.recipe import DTYPES
from parity.testing import Recipe, assert_parity, check_parity, definitions, stored


def test_replicas_go_with_the_judgement(monkeypatch):
    """Without a collection of cycles: a suite of small failing tests once filled 24 GiB."""
    made, joined = [], Oracle._concatenated

    def noted(*args):
        out = joined(*args)
        made.extend(weakref.ref(x) for x in out.values())
        return out

    monkeypatch.setattr(Oracle, "_concatenated", noted)
    inputs = {"x": torch.randn(8, 256, generator=torch.Generator().manual_seed(5)).bfloat16()}
    gc.disable()
    try:
        assert not check_parity(lambda x: 1.1 * x.softmax(-1), lambda x: x.softmax(-1), inputs).agrees
        assert made and not any(x() is not None for x in made)
    finally:
        gc.enable()


def test_flash_attention_reads_its_output_as_it_was_stored():
    """Σ dO·O of an output in bf16: where one key has nearly all the weight, little else is in the query's gradient."""
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        heads = {n: torch.randn(2, 4, 33, 64, generator=generator).bfloat16() for n in "qkv"}

        def kernel(q, k, v):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

        assert_parity(kernel, functools.partial(definitions.attention, causal=True), heads)


def scores_of(q, k):
    seen = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()
    return (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~seen, -torch.inf)


def cast_and_masked(q, k, v):
    weights = torch.nn.functional.softmax(scores_of(q, k), dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.matmul(torch.where(weights > 0, weights, 0.0), v)


def masked_in_place(q, k, v):
    scores = q @ k.mT / q.shape[-1] ** 0.5
    scores[..., torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)] = -torch.inf
    return torch.softmax(scores, -1) @ v


def by_einsum(q, k, v):
    return torch.einsum("bhqk,bhkd->bhqd", stored(scores_of(q, k).softmax(-1)), v)


def with_a_sink(q, k, v):
    whole = torch.cat([scores_of(q, k), q.new_zeros(*q.shape[:-1], 1)], -1)
    return torch.softmax(whole, -1)[..., :-1] @ v


def of_torch(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def flash(q, k, v):
    """softmax(s)·v of which L and the output are kept; backward s is summed in two halves."""

    class Flash(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            scores = scores_of(q.float(), k.float())
            lse = scores.logsumexp(-1, keepdim=True)
            out = ((scores - lse).exp() @ v.float()).to(q.dtype)
            ctx.save_for_backward(q, k, v, out, lse)
            return out

        @staticmethod
        def backward(ctx, g):
            q, k, v, out, lse = (x.float() for x in ctx.saved_tensors)
            half, scale = q.shape[-1] // 2, q.shape[-1] ** -0.5
            parts = (x[..., :half] @ y[..., :half].mT + x[..., half:] @ y[..., half:].mT for x, y in ((q, k),))
            scores = (next(parts) * scale).masked_fill(scores_of(q, k) == -torch.inf, -torch.inf)
            p = (scores - lse).exp()
            ds = p * (g.float() @ v.mT - (g.float() * out).sum(-1, keepdim=True)) * scale
            return tuple(x.to(g.dtype) for x in (ds @ k, ds.mT @ q, p.mT @ g.float()))

    return Flash.apply(q, k, v)


@pytest.mark.parametrize("definition", [cast_and_masked, by_einsum, of_torch, masked_in_place])
def test_attention_may_make_its_weights_again(definition):
    """Where a token sees itself alone the query's gradient is exactly 0, and in a flash kernel the rounding of two products."""
    generator = torch.Generator().manual_seed(3)
    heads = {n: torch.randn(2, 2, 24, 32, generator=generator).bfloat16() for n in "qkv"}
    assert_parity(flash, definition, heads)


def test_the_form_widens_no_output():
    """A first row that is 2e-5 too large, of the forward pass alone: the weights are made again for the backward pass."""

    def too_large(q, k, v):
        out = flash(q, k, v)
        return torch.cat([out[..., :1, :] * (1 + 2e-5), out[..., 1:, :]], -2)

    generator = torch.Generator().manual_seed(3)
    heads = {
        n: scale * torch.randn(1, 1, 24, 64, generator=generator) for n, scale in zip("qkv", (2, 2, 1), strict=True)
    }
    assert not check_parity(too_large, cast_and_masked, heads, protocol="none").quantities["output"].agrees


def test_a_form_of_attention_that_is_another_function_is_left_out():
    """Masked through a view, after the scores are made, and not where they are made again."""

    def through_a_view(q, k, v):
        scores = q @ k.mT
        scores.view(-1).masked_fill_(scores.detach().view(-1) > 1, -torch.inf)
        return torch.softmax(scores, -1) @ v

    heads = {n: torch.randn(1, 1, 6, 4, generator=torch.Generator().manual_seed(5)) for n in "qkv"}
    definitions = (through_a_view, cast_and_masked, by_einsum, with_a_sink, of_torch)
    forms = [Problem(f, heads, {}, tuple(heads), attention=True)._forms for f in definitions]
    assert [len(f) for f in forms] == [1, 2, 2, 2, 2]


def average(old, new, decay):
    return decay * old + (1 - decay) * new


def test_numbers_may_come_in_float32():
    """1 - float32(0.999) is off by 1.3e-5 of 0.001, as in torch.lerp."""
    given = {"old": torch.zeros(64), "new": torch.linspace(1, 2, 64), "decay": 0.999}
    assert check_parity(lambda old, new, decay: torch.lerp(new, old, decay), average, given).agrees
    assert not check_parity(lambda old, new, decay: average(old, new, decay + 1e-6), average, given).agrees


@pytest.mark.parametrize(
    ("define", "number"),
    [
        (average, 0.5),  # of float32
        (lambda old, new, decay: new * torch.rsqrt(new.square() + decay), 1e-6),  # unseen
        (lambda old, new, decay: new * {0.999: 2.0}[decay], 0.999),  # looked up
        (lambda old, new, decay: torch.where(new > decay, new, old), 1.1),  # a jump
    ],
)
def test_a_number_that_float32_does_not_move_has_no_form_of_its_own(define, number):
    given = {"old": torch.zeros(3), "new": torch.tensor([1.0, 1.1, 1.2]), "decay": number}
    assert len(Problem(define, given, {}, ("old", "new"))._forms) == 1


def test_an_upstream_gradient_is_held_by_every_dtype_and_is_never_0_for_a_scalar():
    drawn_ones = torch.stack([cotangent("loss", torch.zeros(()), seed) for seed in range(2000)])
    assert bool(drawn_ones.all())
    for g in (drawn_ones, cotangent("output", torch.zeros(2000), 1)):
        assert all(torch.equal(g.to(dtype).double(), g) for dtype in DTYPES.values())


def test_each_form_begins_on_own_grids():
    """A stored value cancels in one form alone: flash attention's O, on bf16's own numbers among its first replicas."""
    x = torch.linspace(1, 2, 64).bfloat16()
    problem = Problem(lambda x: x / 3, {"x": x}, {}, (), also=(lambda x: stored(x / 3),))
    first = problem.oracle.replicas(Recipe().resolve("bf16"), FEW)["output"][FEW // 2]
    assert torch.equal(first, (x.double() / 3).bfloat16().double())


def test_a_stack_is_split_where_what_lies_between_is_large(monkeypatch):
    """Attention's scores, (T, T) beside inputs of (T, 1), also where torch has them in one operation."""
    widths, stack = [], Problem._stack

    def noted(self, form, recipe, width, *more):
        widths.append(width)
        return stack(self, form, recipe, width, *more)

    monkeypatch.setattr(Problem, "_stack", noted)
    monkeypatch.setattr("parity.judge.problem.LARGEST_WITHIN", 3 * 32 * 32)
    heads = {n: torch.randn(1, 32, 1, generator=torch.Generator().manual_seed(5)) for n in ("query", "key", "value")}
    Problem(F.scaled_dot_product_attention, heads, {}, tuple(heads)).oracle.replicas(Recipe(), 12)
    assert sum(widths) == 12 and max(widths) == 3


def test_the_first_example_can_be_checked_by_hand():
    """docs/judging.md, **By hand**, of the example of docs/testing.md."""
    torch.manual_seed(0)
    x, weight = torch.randn(64, 1024, dtype=torch.bfloat16), torch.randn(1024, dtype=torch.bfloat16)

    def right(x, weight):
        return definitions.rms_norm(x.float(), weight.float()).to(x.dtype)

    def wrong(x, weight):
        return right(x, torch.cat([weight[:-1], weight[-2:-1]]))

    o, u = definitions.rms_norm(x.double(), weight.double()), 2.0**-8
    e, once = wrong(x, weight).double() - o, right(x, weight).double() - o
    gates = verdict(wrong, definitions.rms_norm, {"x": x, "weight": weight})[0].quantities["output"].gates
    by_hand = float(e.norm() / (3 * u * o.norm())), float(e.abs().max() / (6 * u * o.abs().max()))
    assert (gates["norm"], gates["max"]) == pytest.approx(by_hand)
    assert by_hand == pytest.approx((2.10, 8.95), abs=0.005)
    assert [round(float(n), 2) for n in (o.norm(), e.norm(), e.abs().max(), once.norm())] == [255.07, 6.28, 1.95, 0.43]


def by_value(definition):
    """The same, on a path that depends on values: one run a replica."""

    def branching(x):
        return definition(x) if math.isfinite(x.sum().item()) else x

    return branching


def test_replicas_of_a_definition_that_vmap_cannot_run_round_equal_values_alike():
    """A kernel in bf16 whose backward pass takes the output as it was stored; a softmax over a vector."""

    def capped(x):
        return (30 * torch.tanh(9 * x)).logsumexp(-1)

    generator = torch.Generator().manual_seed(0)
    x = {"x": torch.randn(4, 200, generator=generator).bfloat16()}
    for definition in (capped, by_value(capped)):
        assert_parity(capped, definition, x, protocol="none")
        assert not verdict(lambda x: 1.02 * capped(x), definition, x)[0].agrees

    def softmax(x):
        return x.softmax(-1)

    assert_parity(softmax, by_value(softmax), {"x": torch.randn(100, generator=generator)})


def test_a_replica_of_a_definition_that_vmap_cannot_run_has_one_grid():
    """A thousand equal entries are off alike: their mean is as far off as each, not a thirtieth of it."""
    for definition in (torch.exp, by_value(torch.exp)):
        problem = Problem(definition, {"x": torch.full((1000,), 0.7).bfloat16()}, {}, ())
        recipe = Recipe(elementwise="bf16", output="fp32").resolve("bf16")
        errors = problem.oracle.replicas(recipe, 24)["output"] - problem.oracle.exact["output"]
        assert float(errors.mean(1).square().mean()) > 0.5 * float(errors.square().mean()) > 0
