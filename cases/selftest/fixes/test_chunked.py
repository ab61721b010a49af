"""How `selective_log_probs` goes through the head in tiles: memory, a budget for it, narrow gradients of the logits."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from cases.selftest.fixes.test_logprobs import TINY, definition, draw, gradients
from parity.fixes import chunked, selective_log_probs

LOW = (torch.float16, torch.bfloat16)


@pytest.mark.parametrize("chunks", [(1, 1), (1, 100), (7, 3), (131, 21), (1000, 1000)])
def test_every_chunk_size(chunks):
    hidden, weight, bias, ids = draw((3, 7), 20, 131, torch.float64)
    leaves = [x.requires_grad_() for x in (hidden, weight, bias)]
    settings = {"softcap": 2.0, "temperature": 0.7, "logit_scale": 1.7}
    sizes = {"chunk_size": chunks[0], "token_chunk_size": chunks[1]}
    got = selective_log_probs(hidden, weight, ids, bias=bias, entropy=True, **settings, **sizes)
    want = definition(hidden, weight, ids, bias, **settings)
    cotangents = torch.randn(2, 3, 7, generator=torch.Generator().manual_seed(1))
    for g, w in zip(got + gradients(got, cotangents, leaves), want + gradients(want, cotangents, leaves), strict=True):
        torch.testing.assert_close(g, w, rtol=1e-12, atol=1e-13)


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
    found, want = (torch.autograd.grad(f(*leaves), leaves) for f in (compiled, function))
    assert all(torch.equal(g, w) for g, w in zip(found, want, strict=True))


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


def test_a_graph_break_is_refused_where_there_must_be_none():
    hidden, weight, ids = torch.randn(3, 4), torch.randn(7, 4), torch.tensor([0, 5, 6])

    def step(h):
        return selective_log_probs(h * 2, weight, ids) * 3

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


def error(found, exact):
    return float((found.detach().double() - exact.detach()).norm() / exact.detach().norm())


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
