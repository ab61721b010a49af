"""`selective_log_probs` in what drawn cases of family `logprobs` do not ask of it."""

import math
import subprocess
import sys

import pytest
import torch

from parity.fixes import selective_log_probs

TINY = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-24, torch.float64: 2.0**-53}


def definition(hidden, weight, ids, bias=None, temperature=1.0, softcap=None, logit_scale=1.0, ignore_index=-100):
    """Log-probs and entropies in float64; zeros where ids are ignored."""
    kept = ids != ignore_index
    z = torch.where(kept.unsqueeze(-1), hidden, 0.0) @ weight.mT
    if bias is not None:
        z = z + bias
    z = z * logit_scale
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    z = z / temperature
    lse = torch.logsumexp(z, -1)
    picked = z.gather(-1, torch.where(kept, ids, 0).long().unsqueeze(-1)).squeeze(-1)
    p = torch.softmax(z, -1)
    surprise = torch.where(p > 0, (lse.unsqueeze(-1) - z).masked_fill(p == 0, 0.0), 0.0)
    return torch.where(kept, picked - lse, 0.0), torch.where(kept, (p * surprise).sum(-1), 0.0)


def draw(shape, size, vocab, dtype, *, spread=2.0, bias=True):
    generator = torch.Generator().manual_seed(0)
    hidden = (torch.randn(*shape, size, generator=generator) * spread).to(dtype)
    weight = (torch.randn(vocab, size, generator=generator) / math.sqrt(size)).to(dtype)
    head_bias = torch.randn(vocab, generator=generator).to(dtype) if bias else None
    ids = torch.randint(vocab, shape, generator=generator)
    return hidden, weight, head_bias, ids


def gradients(outputs, cotangents, inputs):
    return torch.autograd.grad(outputs, inputs, [c.to(o.dtype) for o, c in zip(outputs, cotangents, strict=True)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("margin", [5.0, 20.0, 40.0, 70.0])
def test_confident_tokens_keep_value_and_gradient(dtype, margin):
    """A token of probability 1 - e^-margin: each row to its own scale, where the plain form gives zeros."""
    hidden, weight = torch.tensor([[1.0, 0.0]], dtype=dtype), torch.tensor([[margin, 0.5], [0.0, 1.0], [0.0, -1.0]])
    weight, ids = weight.to(dtype), torch.tensor([0])
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    wide = [x.detach().double().requires_grad_() for x in leaves]
    z = wide[0] @ wide[1].T
    delta = torch.logsumexp(z[:, 1:], 1) - z[:, 0]
    p, q = torch.sigmoid(-delta), torch.sigmoid(delta)
    low, high = torch.logaddexp(torch.zeros(()), delta), torch.logaddexp(torch.zeros(()), -delta)
    exact = -low, p * low + q * high + q * math.log(2)
    got = selective_log_probs(*leaves, ids, entropy=True, chunk_size=2)
    for g, w in zip(got, exact, strict=True):
        assert g.item() != 0
        assert abs(g.item() / w.item() - 1) < 1e-5
    for kind in (0, 1):
        mine = torch.autograd.grad(got[kind].sum(), leaves, retain_graph=True)
        true = torch.autograd.grad(exact[kind].sum(), wide, retain_graph=True)
        for g, w in zip(mine, true, strict=True):
            assert (g.double() - w).norm() <= 3 * max(TINY[dtype], 1e-5) * w.norm()
            assert g.abs().sum() > 0


def test_ignored_positions_are_exact_zeros_whatever_they_hold():
    hidden, weight, bias, ids = draw((3, 4), 6, 11, torch.float32)
    ids[0], ids[2, 1] = -100, -100
    clean = selective_log_probs(hidden, weight, ids, bias=bias, entropy=True)
    hidden[0], hidden[2, 1] = math.nan, math.inf
    leaves = [x.clone().requires_grad_() for x in (hidden, weight, bias)]
    logps, entropy = selective_log_probs(leaves[0], leaves[1], ids, bias=leaves[2], entropy=True)
    assert torch.equal(logps, clean[0])
    assert torch.equal(entropy, clean[1])
    assert (logps[ids == -100] == 0).all()
    assert (entropy[ids == -100] == 0).all()
    (logps.sum() + entropy.sum()).backward()
    assert (leaves[0].grad[ids == -100] == 0).all()
    assert all(x.grad.isfinite().all() for x in leaves)


@pytest.mark.parametrize("shape", [(3, 4), (0,), (2, 0)])
def test_nothing_to_score(shape):
    hidden, weight, bias, ids = draw(shape, 6, 11, torch.float32)
    leaves = [x.requires_grad_() for x in (hidden, weight, bias)]
    logps, entropy = selective_log_probs(hidden, weight, torch.full_like(ids, -100), bias=bias, entropy=True)
    assert logps.shape == ids.shape and (logps == 0).all() and (entropy == 0).all()
    assert all((grad == 0).all() for grad in torch.autograd.grad(logps.sum() + entropy.sum(), leaves))


def test_hidden_states_of_no_size():
    logps = selective_log_probs(torch.zeros(2, 0), torch.zeros(5, 0), torch.tensor([1, 4]))
    assert torch.equal(logps, torch.full((2,), -math.log(5)))


def test_autocast_rounds_the_operands_only():
    hidden, weight, bias, ids = draw((4, 3), 16, 50, torch.float32)
    leaves = [x.requires_grad_() for x in (hidden, weight, bias)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logps, entropy = selective_log_probs(hidden, weight, ids, bias=bias, entropy=True)
        got = torch.autograd.grad(logps.sum() + entropy.sum(), leaves)
    rounded = [hidden.detach().bfloat16().double(), weight.detach().bfloat16().double(), bias.detach().double()]
    wide = [x.requires_grad_() for x in rounded]
    want = definition(wide[0], wide[1], ids, wide[2])
    assert logps.dtype == torch.float32
    assert (logps.double() - want[0]).abs().max() < 1e-5
    for g, w in zip(got, torch.autograd.grad(want[0].sum() + want[1].sum(), wide), strict=True):
        assert g.dtype == torch.float32
        assert (g.double() - w).norm() < 1e-5 * w.norm()


def test_importing_is_light():
    """Triton reads TRITON_INTERPRET when it is imported, so importing the fixes must not do that behind one's back."""
    heavy = "{'triton', 'transformers', 'trl', 'liger_kernel', 'cut_cross_entropy', 'peft'}"
    program = f"import sys, parity.fixes; raise SystemExit(str(found) if (found := {heavy} & set(sys.modules)) else 0)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": 0.0}, "temperature=0.0"),
        ({"softcap": 0.0}, "softcap=0.0"),
        ({"logit_scale": math.inf}, "logit_scale=inf"),
        ({"chunk_size": 0}, "chunk_size=0"),
        ({"token_chunk_size": 2.0}, "token_chunk_size=2.0: must be a whole number"),
        ({"temperature": None}, "temperature=None: must be a number"),
        ({"softcap": "30"}, "softcap='30': must be a number"),
        ({"temperature": 1e-38}, "logit_scale=1.0, temperature=1e-38: logit_scale / temperature is beyond 2..64"),
        ({"softcap": 1e39}, "softcap=1e.39, temperature=1.0: softcap / temperature is beyond 2..64"),
        ({"ids": torch.tensor([0, 5])}, r"ids: 5 is outside \[0, 5\)"),
        ({"ids": torch.tensor([-1, 0])}, "ids: -1 is outside"),
        ({"ids": torch.tensor([0])}, r"ids of shape \(1,\)"),
        ({"ids": torch.tensor([0.0, 1.0])}, "ids of dtype torch.float32"),
        ({"weight": torch.zeros(5, 4)}, r"hidden of shape \(2, 3\)"),
        ({"weight": torch.zeros(0, 3)}, r"weight of shape \(0, 3\)"),
        ({"bias": torch.zeros(4)}, r"bias of shape \(4,\)"),
        ({"hidden": None}, "hidden=None: must be a tensor"),
        ({"bias": 0.5}, "bias=0.5: must be a tensor"),
        ({"ignore_index": None}, "ignore_index=None: must be a whole number"),
        ({"hidden": torch.zeros(2, 3, dtype=torch.int64)}, "hidden of dtype torch.int64"),
    ],
)
def test_bad_input_is_named(change, message):
    arguments = {"hidden": torch.zeros(2, 3), "weight": torch.zeros(5, 3), "ids": torch.tensor([0, 1])} | change
    with pytest.raises(ValueError, match=message):
        selective_log_probs(**arguments)
