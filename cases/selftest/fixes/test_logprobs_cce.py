"""`selective_log_probs(backend="cce")`: cut-cross-entropy behind it, and what it refuses."""

import importlib
import os

import pytest
import torch

from parity.fixes import selective_log_probs

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None
from cases.selftest.fixes.test_logprobs import SETTINGS, definition, draw, gradients


def interpreted_tanh(a):
    return 2 * tl.sigmoid(2 * a) - 1


def interpreted_log1p(a):
    return tl.log(1 + a)


@pytest.fixture
def interpreted_cce(monkeypatch):
    """cut-cross-entropy in Triton's interpreter, with the two libdevice calls it cannot make spelled out."""
    if triton is None or os.environ.get("TRITON_INTERPRET") != "1" or torch.cuda.is_available():
        pytest.skip("needs TRITON_INTERPRET=1, set before triton is imported")
    tl_utils = pytest.importorskip("cut_cross_entropy.tl_utils")
    monkeypatch.setattr(tl_utils, "tl_tanh", triton.jit(interpreted_tanh))
    monkeypatch.setattr(tl_utils, "tl_log1p", triton.jit(interpreted_log1p))
    # The package compiles this one-liner; eager it is the same and does not take half a minute.
    indexed_dot = importlib.import_module("cut_cross_entropy.indexed_dot")
    monkeypatch.setattr(indexed_dot, "softcapping", lambda x, cap: torch.tanh(x / cap) * cap)


CCE = {"plain": {}, "exact": {"temperature": 0.5, "softcap": 2.0}, "rounded": SETTINGS["all"]}


@pytest.mark.parametrize(("name", "vocab"), [("plain", 1), ("plain", 131), ("exact", 256), ("rounded", 256)])
def test_cce_honours_temperature_with_softcap(interpreted_cce, name, vocab):
    hidden, weight, _, ids = draw((2, 4), 32, vocab, torch.float16, bias=False, spread=1.0)
    ids[0, 1] = -100
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    wide = [x.detach().double().requires_grad_() for x in leaves]
    got = selective_log_probs(hidden, weight, ids, backend="cce", **CCE[name])
    want, _ = definition(wide[0], wide[1], ids, **CCE[name])
    assert got.dtype == torch.float32
    assert (got[ids == -100] == 0).all()
    assert (got.double() - want).abs().max() < 5e-3
    cotangent = torch.tensor([1.0, -2.0]).reshape(2, 1).expand(2, 4)
    for g, w in zip(gradients([got], [cotangent], leaves), gradients([want], [cotangent], wide), strict=True):
        assert (g.double() - w).norm() <= 5e-3 * w.norm() + 1e-6


def test_cce_filters_only_when_asked(interpreted_cce):
    """Without a filter the gradient of every token is there; with one as coarse as 0.5, tiles of rare tokens have none."""
    hidden, weight, _, ids = draw((1, 2), 32, 600, torch.float16, bias=False, spread=1.0)
    ids[:] = 3
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    rows = {}
    with torch.compiler.set_stance("force_eager"):  # the filter compiles a small sort, for most of a minute
        for eps in (None, 0.5):
            logps = selective_log_probs(hidden, weight, ids, backend="cce", filter_eps=eps)
            rows[eps] = (torch.autograd.grad(logps.sum(), leaves)[1] == 0).all(1).sum().item()
    assert rows[None] == 0
    assert rows[0.5] > 300


def test_cce_refuses_a_cap_it_would_get_wrong():
    hidden, weight, _, ids = draw((2, 4), 32, 131, torch.float16, bias=False)
    with pytest.raises(ValueError, match="a vocabulary of 131, not a multiple of 256"):
        selective_log_probs(hidden, weight, ids, backend="cce", softcap=2.0)


def test_cce_refuses_to_overflow():
    hidden, weight, _, ids = draw((2, 4), 32, 131, torch.float16, bias=False)
    with pytest.raises(ValueError, match="overflows torch"):
        selective_log_probs(hidden * 1000, weight, ids, backend="cce", temperature=0.001)


def test_cce_needs_triton(monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("Triton runs here")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    hidden, weight, _, ids = draw((2, 4), 32, 131, torch.float16, bias=False)
    with pytest.raises(ValueError, match="on cpu: Triton does not run"):
        selective_log_probs(hidden, weight, ids, backend="cce")
