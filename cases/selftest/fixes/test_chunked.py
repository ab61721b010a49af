"""How `selective_log_probs` goes through the head in tiles: memory, a budget for it, narrow gradients of the logits."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from cases.bench.measure import peak
from cases.selftest.fixes.test_logprobs import SETTINGS, TINY, compare, definition, draw, gradients
from parity.fixes import FusedLinearGRPOLoss, chunked, selective_log_probs

LOW = (torch.float16, torch.bfloat16)


@pytest.mark.parametrize("chunks", [(1, 1), (1, 100), (7, 3), (131, 21), (1000, 1000)])
def test_every_chunk_size(chunks):
    arguments = draw((3, 7), 20, 131, torch.float64)
    compare(*arguments, SETTINGS["all"], chunk_size=chunks[0], token_chunk_size=chunks[1], tolerance=1e-13)


class Sizes(TorchDispatchMode):
    """The largest tensor that any operation returns, by number of elements."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        views = ("aten::t", "aten::view", "aten::transpose", "aten::_unsafe_view", "aten::detach", "aten::alias")
        if isinstance(out, torch.Tensor) and func.name() not in views:
            self.largest = max(self.largest, out.numel())
        return out


def test_neither_logits_nor_a_frozen_heads_gradient_exist():
    hidden, weight, _, ids = draw((300,), 40, 5000, torch.float32, bias=False)
    hidden.requires_grad_()
    for trainable, most in ((False, 300 * 1024), (True, 300 * 1024)):
        with Sizes() as sizes:
            logps, entropy = selective_log_probs(hidden, weight.requires_grad_(trainable), ids, entropy=True)
            (logps.sum() + entropy.sum()).backward()
        assert sizes.largest <= most
    with Sizes() as sizes:
        logps = selective_log_probs(hidden, weight.requires_grad_(False), ids, chunk_size=100, token_chunk_size=50)
        logps.sum().backward()
    assert sizes.largest <= max(hidden.numel(), 256 * 40) < weight.numel()


@pytest.mark.parametrize("reentrant", [True, False])
def test_inside_checkpointing(reentrant):
    hidden, weight, bias, ids = draw((4, 3), 6, 50, torch.float32)
    leaves = [x.requires_grad_() for x in (hidden, weight, bias)]

    def function(h, w, b):
        return selective_log_probs(h * 1.0, w, ids, bias=b)

    torch.autograd.backward(checkpoint(function, *leaves, use_reentrant=reentrant).sum())
    plain = torch.autograd.grad(function(*leaves).sum(), leaves)
    for leaf, g in zip(leaves, plain, strict=True):
        assert torch.equal(leaf.grad, g)


def test_inside_compile():
    hidden, weight, bias, ids = draw((4, 3), 6, 50, torch.float32)
    leaves = [x.requires_grad_() for x in (hidden, weight, bias)]

    def function(h, w, b):
        return (selective_log_probs(h * 2.0, w, ids, bias=b) * 3.0).sum()

    compiled = torch.compile(function, backend="eager")
    assert torch.equal(compiled(*leaves), function(*leaves))
    for g, w in zip(
        torch.autograd.grad(compiled(*leaves), leaves), torch.autograd.grad(function(*leaves), leaves), strict=True
    ):
        assert torch.equal(g, w)


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_narrow_dlogits_neither_bias_nor_underflow(dtype, monkeypatch):
    """What CUDA does with 16-bit operands, on the CPU: a large vocabulary and a tiny cotangent."""
    monkeypatch.setattr(chunked, "_rounds_dlogits", lambda settings, device: True)
    hidden, weight, bias, ids = draw((16,), 8, 3000, dtype, spread=0.1)
    leaves = [x.requires_grad_() for x in (hidden, weight, bias)]
    wide = [x.detach().double().requires_grad_() for x in leaves]
    cotangents = [torch.full((16,), 1e-10), torch.full((16,), 1e-10)]
    got = gradients(selective_log_probs(hidden, weight, ids, bias=bias, entropy=True), cotangents, leaves)
    want = gradients(definition(wide[0], wide[1], ids, wide[2]), cotangents, wide)
    for g, w in zip(got, want, strict=True):
        assert (g.double() - w).norm() <= 2 * TINY[dtype] * w.norm() + 2.0**-25 * math.sqrt(w.numel())


def test_a_second_derivative_is_refused_and_not_0():
    """create_graph=True gives the gradient; differentiating that raises, though the cotangent requires no gradient."""
    hidden, weight = torch.randn(3, 4, requires_grad=True), torch.randn(7, 4)
    logps, entropies = selective_log_probs(hidden, weight, torch.tensor([0, 5, 6]), entropy=True)
    (once,) = torch.autograd.grad(logps.sum() + entropies.sum(), hidden, retain_graph=True)
    (gradient,) = torch.autograd.grad(logps.sum() + entropies.sum(), hidden, create_graph=True)
    assert torch.equal(once, gradient)
    with pytest.raises(RuntimeError, match="not differentiable twice"):
        (hidden.square().sum() + gradient.square().sum()).backward()


def test_a_graph_break_inside_compile_and_refused_where_there_must_be_none():
    hidden, weight, ids = torch.randn(3, 4), torch.randn(7, 4), torch.tensor([0, 5, 6])

    def step(h):
        return selective_log_probs(h * 2, weight, ids) * 3

    torch.testing.assert_close(torch.compile(step, backend="eager")(hidden), step(hidden))
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(step, backend="eager", fullgraph=True)(hidden)


def kept_run(budget, dtype, softcap, frozen, monkeypatch, entropy=True, **more):
    """Values, gradients of three backward passes of one graph, and how many products of tiles there were."""
    hidden, weight, bias, ids = draw((3, 50), 8, 300, dtype)
    ids[1, :7] = -100
    bias[:128] = -torch.inf  # with chunk_size=128 a tile in which nothing is finite
    ids[ids.ge(0) & ids.lt(128)] = 128
    leaves = [x.requires_grad_() for x in ((hidden,) if frozen else (hidden, weight, bias))]
    made, product = [], chunked._raw_tile
    monkeypatch.setattr(chunked, "_raw_tile", lambda *a: made.append(1) or product(*a))
    kwargs = dict(bias=bias, softcap=softcap, temperature=0.7, entropy=entropy, memory_budget=budget, **more)
    out = selective_log_probs(hidden, weight, ids, **kwargs)
    out = out if entropy else (out,)
    cotangents = [torch.ones_like(out[0]), 0.1 * torch.ones_like(out[0])][: len(out)]
    passes = [torch.autograd.grad(out, leaves, cotangents, retain_graph=again) for again in (True, True, False)]
    monkeypatch.undo()
    assert all(torch.equal(x, y) for one in passes[1:] for x, y in zip(passes[0], one, strict=True))
    return [*out, *passes[0]], len(made)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("softcap", "frozen"), [(None, False), (3.0, False), (None, True)])
def test_logits_that_fit_the_budget_are_not_computed_again(monkeypatch, dtype, softcap, frozen):
    for more, tiles in (({}, 1), ({"chunk_size": 128}, 3)):
        none, all_made = kept_run(None, dtype, softcap, frozen, monkeypatch, **more)
        kept, once = kept_run(2**40, dtype, softcap, frozen, monkeypatch, **more)
        assert (all_made, once) == (4 * tiles, tiles)  # forward and three backward passes
        assert all(torch.equal(a, b) for a, b in zip(none, kept, strict=True))
    none, _ = kept_run(None, dtype, softcap, frozen, monkeypatch, entropy=False, chunk_size=128)
    kept, once = kept_run(2**40, dtype, softcap, frozen, monkeypatch, entropy=False, chunk_size=128)
    assert once == 3 and all(torch.isfinite(x).all() for x in kept)
    for a, b in zip(none, kept, strict=True):  # exponentials are kept: the same roundings in another order
        assert (a.double() - b.double()).norm() <= 2 * torch.finfo(dtype).eps * a.double().norm()


def test_a_budget_shrinks_tiles_first_and_keeps_what_fits(monkeypatch):
    exact, _ = kept_run(None, torch.float64, None, False, monkeypatch)
    counts = []
    for budget in (1, 1_200_000, 2**40):
        found, made = kept_run(budget, torch.float64, None, False, monkeypatch)
        counts.append(made)
        assert all(torch.allclose(a, b, rtol=1e-9, atol=1e-12) for a, b in zip(exact, found, strict=True))
    assert counts[0] == 4 * 6 > counts[1] > counts[2] == 1  # 2 x 3 tiles of 128 x 128, all computed four times
    with pytest.raises(ValueError, match="memory_budget"):
        selective_log_probs(torch.ones(1, 2), torch.ones(3, 2), torch.zeros(1, dtype=torch.long), memory_budget=0)


NARROW = [{}, {"memory_budget": 2**40}, {"chunk_size": 128}, {"chunk_size": 128, "memory_budget": 2**40}]


def error(found, exact):
    return float((found.detach().double() - exact.detach()).norm() / exact.detach().norm())


@pytest.mark.parametrize("more", NARROW, ids=str)
@pytest.mark.parametrize(("entropy", "softcap"), [(False, None), (True, None), (False, 3.0), (True, 3.0)])
def test_narrow_products_are_as_accurate_as_plain_bfloat16_logits(more, entropy, softcap):
    hidden, weight, bias, ids = draw((3, 50), 24, 300, torch.bfloat16)
    ids[1, :7] = -100
    leaves = [x.requires_grad_() for x in (hidden, weight, bias)]
    cotangents = [torch.randn(3, 50, generator=torch.Generator().manual_seed(1)).masked_fill(ids < 0, 0)] * (
        1 + entropy
    )
    kwargs = {"softcap": softcap, "temperature": 0.7}
    wide = [x.detach().double().requires_grad_() for x in leaves]
    exact = definition(wide[0], wide[1], ids, wide[2], **kwargs)[: 1 + entropy]
    want = [*exact, *gradients(exact, [c.double() for c in cotangents], wide)]
    z = torch.nn.functional.linear(hidden, weight, bias)  # plain: bfloat16 logits, the rest in float32
    z = (z.float() if softcap is None else softcap * torch.tanh(z.float() / softcap)) / 0.7
    logs = torch.log_softmax(z, -1)
    logps = logs.gather(-1, ids.clamp(min=0).unsqueeze(-1)).squeeze(-1).masked_fill(ids < 0, 0)
    plain = (logps, -(logs.exp() * logs).sum(-1).masked_fill(ids < 0, 0))[: 1 + entropy]
    plain = [*plain, *gradients(plain, cotangents, leaves)]
    got = selective_log_probs(hidden, weight, ids, bias=bias, entropy=entropy, narrow_products=True, **kwargs, **more)
    got = got if entropy else (got,)
    again = torch.autograd.grad(got, leaves, cotangents, retain_graph=True)
    found = torch.autograd.grad(got, leaves, cotangents)
    assert all(torch.equal(x, y) for x, y in zip(again, found, strict=True))  # the first pass left what it read
    errors = [error(x, y) for x, y in zip([*got, *found], want, strict=True)]
    assert max(errors[: len(got)]) > 2.0**-16  # products are narrow: this is no float32
    for mine, other in zip(errors, (error(x, y) for x, y in zip(plain, want, strict=True)), strict=True):
        assert mine <= 1.3 * other


@pytest.mark.parametrize("more", NARROW, ids=str)
def test_narrow_products_leave_equal_logits_equal(more):
    """The chosen token's logit is rounded as its rival's, so that the log-prob is -log 2, however large both are."""
    weight = torch.randn(2, 24, generator=torch.Generator().manual_seed(0)).bfloat16()[[0, 0, 1]]
    hidden = 9 * weight[:1]
    found = selective_log_probs(hidden, weight, torch.tensor([1]), narrow_products=True, **more)
    torch.testing.assert_close(found, torch.tensor([-math.log(2)]), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_narrow_products_change_nothing_in_other_dtypes(dtype):
    hidden, weight, bias, ids = draw((3, 5), 8, 300, dtype)
    a, b = (selective_log_probs(hidden, weight, ids, bias=bias, narrow_products=n) for n in (False, True))
    assert torch.equal(a, b)


def test_all_narrow_logits_are_one_product_each_within_the_budget(monkeypatch):
    """2,048 x 4,096 logits of 2 bytes and what is worked on: no tile is multiplied. With room for the logits alone tiles are."""
    hidden, weight, _, ids = draw((2048,), 8, 4096, torch.bfloat16)
    made, product = [], chunked._raw_tile
    monkeypatch.setattr(chunked, "_raw_tile", lambda *a: made.append(1) or product(*a))
    logits = 2 * ids.numel() * weight.shape[0]
    for budget, tiles in ((2 * logits + 2**24, False), (logits, True)):
        made.clear()
        leaf = weight.clone().requires_grad_()
        selective_log_probs(hidden, leaf, ids, narrow_products=True, memory_budget=budget).sum().backward()
        assert bool(made) == tiles


def test_all_narrow_logits_stay_within_the_budget_with_some_ignored(monkeypatch):
    """The scored hidden states are copied side by side: with wide ones that is more than a tile."""
    hidden, weight, _, ids = draw((4000,), 1500, 500, torch.bfloat16, bias=False)
    ids[0] = -100
    leaves = [x.requires_grad_() for x in (hidden, weight)]
    made, product = [], chunked._raw_tile
    monkeypatch.setattr(chunked, "_raw_tile", lambda *a: made.append(1) or product(*a))
    took_whole = []
    for budget in (17_000_000, 29_000_000):
        made.clear()
        with peak("cpu") as found:
            logps = selective_log_probs(hidden, weight, ids, narrow_products=True, memory_budget=budget)
            gradients = torch.autograd.grad(logps.sum(), leaves)
        took_whole.append(not made)
        if not made:
            assert found.bytes <= budget + sum(g.nbytes for g in gradients)
    assert took_whole == [False, True]


def test_all_narrow_logits_take_the_memory_of_logits_and_gradients_alone():
    """What is worked on is given back before the gradients are made: no more than plain logits and their gradient."""
    hidden, weight, _, ids = draw((256,), 256, 8192, torch.bfloat16, bias=False)
    leaves = [x.requires_grad_() for x in (hidden, weight)]
    with peak("cpu") as found:
        selective_log_probs(hidden, weight, ids, narrow_products=True, memory_budget=2**40).sum().backward()
    scratch = []  # of the CPU's products themselves: 2.6 MB on one with AMX
    with torch.no_grad():
        dlogits = torch.zeros(ids.numel(), weight.shape[0], dtype=torch.bfloat16)
        for a, b in ((hidden, weight.T), (dlogits, weight), (dlogits.T, hidden)):
            with peak("cpu") as product:
                made = a @ b
            scratch.append(product.bytes - made.nbytes)
    assert max(scratch) < dlogits.nbytes  # else nothing would be seen
    assert found.bytes <= 1.05 * (dlogits.nbytes + sum(x.nbytes for x in leaves)) + max(scratch)


@pytest.mark.parametrize("more", NARROW, ids=str)
def test_narrow_logits_of_certain_tokens_have_their_tiny_entropies(more):
    """Of e^-20, from logits of hundreds: a rounding of those must not enter."""
    weight = torch.diag(torch.tensor([32.0, 32.0, 2.0, 1.0])).bfloat16()
    hidden = torch.tensor([[13.0, 11, 5, 7], [27, 29, 1, 3], [21, 23, 3, 9]]).bfloat16().requires_grad_()
    ids = torch.tensor([2, 3, 2])
    want, wide = (hidden @ weight.t()).detach().double(), hidden.detach().double().requires_grad_()
    z = wide @ weight.double().t()
    assert torch.equal(z.detach(), want)  # nothing is rounded
    exact = definition(wide, weight.double(), ids, None, temperature=3.0)
    _, entropies = selective_log_probs(hidden, weight, ids, temperature=3.0, entropy=True, narrow_products=True, **more)
    torch.testing.assert_close(entropies.double(), exact[1].detach(), rtol=0.1, atol=0)
    (found,), (right,) = (torch.autograd.grad(e.sum(), x) for e, x in ((entropies, hidden), (exact[1], wide)))
    torch.testing.assert_close(found[:, :2].double(), right[:, :2], rtol=0.1, atol=0)


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("case", ["signs and zeros", "no other token", "banned", "one not finite"])
def test_narrow_logits_kept_whole_and_in_tiles_agree(case, entropy):
    hidden, weight, bias, ids = draw((40,), 24, 300, torch.bfloat16)
    cotangent = torch.randn(40, generator=torch.Generator().manual_seed(1))
    cotangent[::3] = 0
    if case == "no other token":
        bias[:], ids[:] = -torch.inf, 5
        bias[5], ids[7] = 1.0, 6
    if case == "banned":
        bias[:128], ids[:5] = -torch.inf, 3
    if case == "one not finite":
        hidden[3, 0], cotangent[5], cotangent[7] = torch.nan, torch.nan, torch.inf
    leaves = [x.requires_grad_() for x in (hidden, weight, bias)]
    found = []
    for more in ({"memory_budget": 2**40}, {"chunk_size": 300}):
        out = selective_log_probs(
            hidden, weight, ids, bias=bias, temperature=0.7, entropy=entropy, narrow_products=True, **more
        )
        out = out if entropy else (out,)
        found.append([*out, *torch.autograd.grad(out, leaves, [cotangent, 0.1 * cotangent][: len(out)])])
    for whole, tiles in zip(*found, strict=True):
        size = float(tiles.detach().nan_to_num(0, 0, 0).abs().max())
        torch.testing.assert_close(whole, tiles, rtol=2.0**-7, atol=0.01 * size, equal_nan=True)
        assert torch.equal(whole == 0, tiles == 0)


@pytest.mark.parametrize("more", NARROW, ids=str)
def test_narrow_gradients_of_tiny_cotangents_scale_with_them(more):
    """A CPU's bfloat16 units take subnormal numbers for 0: without a scale of their own such gradients vanish."""
    hidden, weight, _, ids = draw((3, 50), 64, 300, torch.bfloat16)
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    logps = selective_log_probs(hidden, weight, ids, narrow_products=True, **more)
    one, many = (
        torch.autograd.grad(logps, leaves, torch.full_like(logps, size), retain_graph=True) for size in (2.0**-126, 1.0)
    )
    for a, b in zip(one, many, strict=True):
        assert (a.double() * 2.0**126 - b.double()).abs().max() <= 2.0**-6 * b.abs().max()


def test_many_alike_parts_of_a_gradient_do_not_drift():
    """819 float32 sums, one by one, of parts that are alike round alike: 1e-5 of the gradient, and growing."""
    hidden, weight, _, _ids = draw((4,), 8, 4095, torch.float32)
    weight = weight[:1].expand_as(weight).contiguous()
    weight[-1] *= -3
    found, exact = (
        torch.autograd.grad(selective_log_probs(h, w, torch.full((4,), 4094), chunk_size=5).sum(), h)[0]
        for h, w in ((hidden.requires_grad_(), weight), (hidden.detach().double().requires_grad_(), weight.double()))
    )
    assert error(found, exact) < 2e-6


@pytest.mark.parametrize("value", ["no", None, torch.bfloat16, 2])
def test_narrow_products_is_a_switch(value):
    with pytest.raises(ValueError, match="narrow_products=.*: must be True or False"):
        selective_log_probs(torch.ones(1, 2), torch.ones(3, 2), torch.zeros(1, dtype=torch.long), narrow_products=value)
    with pytest.raises(ValueError, match="narrow_products"):
        FusedLinearGRPOLoss(beta=0.0, use_ref_model=False, narrow_products=value)
