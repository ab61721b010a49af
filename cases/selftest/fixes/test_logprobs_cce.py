"""`selective_log_probs(backend="cce")`: cut-cross-entropy behind it, and what it refuses."""

import pytest
import torch

from cases.selftest.fixes.test_logprobs import draw
from parity.fixes import selective_log_probs
from parity.registry import family, load, run_case

CCE = load()["fixes.selective_log_probs.cce"]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""Where Triton runs: on the CPU in its interpreter."""
installed = pytest.mark.skipif(CCE.missing() is not None, reason="cut-cross-entropy is not installed")


@installed
@pytest.mark.parametrize(
    "settings",
    [
        {"V": 1},
        {"V": 131},
        {"V": 256, "temperature": 0.5, "softcap": 2.0},
        {"V": 256, "temperature": 0.7, "softcap": 2.0, "logit_scale": 1.7},
    ],
    ids=["one", "plain", "exact", "rounded"],
)
def test_cce_honours_temperature_with_softcap(settings):
    case = family("logprobs").case(3, "fp16", {"B": 2, "T": 4, "H": 32, "ignored": "some", **settings})
    with torch.compiler.set_stance("force_eager"):  # the package compiles a one-liner, for half a minute
        found = {r.quantity: r.verdict for r in run_case(case, [CCE], DEVICE, thorough=False)}
    found.pop("protocol")  # the first import of the package rebinds names
    assert set(found.values()) == {"agree"} and found.keys() >= {"logps", "grad_weight"}


@installed
def test_cce_filters_only_when_asked():
    """Without a filter the gradient of every token is there; with one as coarse as 0.5, tiles of rare tokens have none."""
    hidden, weight, _, ids = draw((1, 2), 32, 600, torch.float16, bias=False, spread=1.0)
    ids[:] = 3
    hidden, weight, ids = (x.to(DEVICE) for x in (hidden, weight, ids))
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    rows = {}
    # the filter compiles a small sort, for most of a minute
    with CCE.around(), torch.compiler.set_stance("force_eager"):
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
