"""Family `preference`: the loss by hand from log-probs, what is ignored, and what a wrong implementation of it shows."""

import dataclasses
import math

import pytest
import torch

from cases.selftest.controls.correct import control
from cases.selftest.controls.soak import drawn
from cases.selftest.mutants.mutant import mutants
from parity import data
from parity.case import drawing
from parity.case.case import Case
from parity.families.head import IGNORE_INDEX
from parity.families.preference import FAMILY, KTO_PARTS, LOSS_TYPES
from parity.implementations import user
from parity.judging.oracle import exact
from parity.registry import load, run_case


def test_a_backward_pass_that_fails_is_a_crash_of_the_library():
    """TRL multiplies the output of relu by its weights in place."""
    case = Case("preference", 4, "fp32", {"B": 4, "weighting": True, "loss_type": "hinge"})
    (row,) = run_case(case, [load()["trl.DPOTrainer"]], thorough=False)
    assert row.verdict == "crashed" and "inplace" in row.message


def margin(hidden, weight, ids, ref_hidden, ref_weight):
    """Δ_w - Δ_l of each pair."""

    def summed(h, w):
        table = (h.float() @ w.float().T).log_softmax(-1)
        return (table.gather(-1, ids.clamp(min=0)[..., None])[..., 0] * (ids != IGNORE_INDEX)).sum(-1)

    chosen, rejected = (summed(hidden, weight) - summed(ref_hidden, ref_weight).detach()).chunk(2)
    return chosen - rejected


@pytest.mark.parametrize("name", ["dpo-satisfied", "dpo-far-from-satisfied"])
def test_frozen_cases_of_dpo_s_own_loss_away_from_log_2(name):
    """Draws rarely have it there: log σ by two functions, which is infinite at -104 and loses its digits at 10, agreed on all."""

    def dpo(twice):
        def loss(hidden, weight, ids, ref_hidden, ref_weight, beta):
            z = beta * margin(hidden, weight, ids, ref_hidden, ref_weight)
            return -(torch.sigmoid(z).log() if twice else torch.nn.functional.logsigmoid(z)).mean()

        return loss

    case = Case.load(data.cases_dir() / "regressions" / f"{name}.json")
    for twice, verdict in ((False, "agree"), (True, "disagree")):
        rows = run_case(case, [user.from_function(dpo(twice), "my.py:dpo", [FAMILY])], thorough=False)
        assert {r.verdict for r in rows if r.quantity in ("loss", "grad_hidden")} == {verdict}


@pytest.mark.parametrize("share", [1.0, 0.0])
def test_dpo_s_own_loss_may_be_smoothed(share):
    """Conservative DPO was called wrong, "smoothing means nothing beside the other settings". TRL and Liger do not smooth it."""

    def cdpo(hidden, weight, ids, ref_hidden, ref_weight, beta, smoothing=0.0):
        z, e = beta * margin(hidden, weight, ids, ref_hidden, ref_weight), share * smoothing
        return (-(1 - e) * torch.nn.functional.logsigmoid(z) - e * torch.nn.functional.logsigmoid(-z)).mean()

    mine = user.from_function(cdpo, "my.py:cdpo", [FAMILY])
    for smoothing in (0.0, 0.3):
        case = Case("preference", 4, "fp32", {"B": 4, "smoothing": smoothing})
        rows = run_case(case, [mine], thorough=share == 1.0)
        assert any(r.failing for r in rows) == (share * smoothing != smoothing)
    every = [i for i in load().values() if i.family == "preference" and i.library]
    assert {r.verdict for r in run_case(case, every, thorough=False)} == {"unsupported"}


@pytest.mark.parametrize("name", KTO_PARTS)
def test_each_sum_of_kto_is_judged(name):
    """They are what its trainer logs; the loss alone was looked at."""
    pytest.importorskip("liger_kernel")
    liger = load()["liger.FusedLinearKTOLoss"]
    case = Case("preference", 4, "fp32", {"B": 5, "method": "kto", "loss_type": "kto", "chunk_size": 2})

    def wrong(x):
        out = liger.call(x)
        return out | {name: out[name] / 2}

    for call, verdict in ((liger.call, "agree"), (wrong, "disagree")):
        rows = {r.quantity: r.verdict for r in run_case(case, [dataclasses.replace(liger, call=call)], thorough=False)}
        assert rows[name] == verdict and {v for n, v in rows.items() if n != name} == {"agree"}, rows


def test_every_loss_type_and_the_edges_of_the_numbers_are_drawn():
    """beta where hinge and sigmoid are flat or straight; SimPO's margin at 0 and far out; labels of which half are wrong."""
    every = [FAMILY.full_settings(case) for case in drawn("preference", 250, 0)]
    assert {(s.method, s.loss_type) for s in every} == {(m, t) for m, types in LOSS_TYPES.items() for t in types}
    betas = [s.beta for s in every]
    assert min(betas) <= 0.001 and max(betas) >= 32
    margins = [s.gamma for s in every if s.loss_type == "simpo"]
    assert 0.0 in margins and max(margins) >= 8
    assert {s.loss_type for s in every if s.smoothing == 0.49} >= {"robust", "exo_pair"}
    sorted_pairs = [s for s in every if s.loss_type in ("aot", "aot_unpaired")]
    assert sum(s.B > 2 and s.gap == "apart" for s in sorted_pairs) >= 5


def test_a_banned_first_token_at_an_ignored_label_is_seen():
    case = Case("preference", 0, "fp32", {"B": 2, "T": 3, "V": 4, "H": 2, "bias": "banned"})
    rows = list(run_case(case, [load()["liger.FusedLinearDPOLoss"]], thorough=False))
    assert {r.gate for r in rows if r.failing} == {"structure"}


def test_a_reference_apart_has_a_bias_of_its_own():
    """With the policy's, a loss that reads that one for both was right in every case. Both ban the same tokens."""
    case = Case("preference", 0, "bf16", {"V": 40, "bias": "banned", "gap": "apart"})
    x = FAMILY.build(case)
    assert ((x.bias == x.ref_bias) == (x.bias == -math.inf)).all() and (x.bias == -math.inf).any()
    (wrong,) = (m.implementation for m in mutants("preference") if m.name == "reference-by-policy-bias")
    assert {r.verdict for r in run_case(case, [wrong], thorough=False) if r.quantity == "loss"} == {"disagree"}
    x = FAMILY.build(Case("preference", 0, "bf16", {"bias": "random", "gap": "near"}))
    assert x.ref_bias.equal(x.bias), "a policy that began at the reference"


def test_a_bias_that_targets_read_by_index_may_drift():
    """`bias[ids]` beside a product: 148,480 equal gradients are added in turn to one entry, a hundredth off in float32."""
    settings = {"B": 4, "H": 2, "T": 18560, "V": 2, "average": True, "beta": 0.5, "bias": "banned"}
    settings |= {"chunk_size": 2, "nll": 1.0, "ignored": "none", "peak": 50.0}
    settings |= {"cotangent": "small", "layout": "strided", "layouts": "offset", "loss_type": "hinge", "method": "cpo"}
    settings |= {"grad": "hidden bias"}  # the control declines that of the head, which it sums by index too
    case, right = Case("preference", 0, "fp32", settings), control("control.preference.apart")
    found = {r.quantity: r for r in run_case(case, [right], "cpu", False, lambda i: None, None)}
    assert {q: r.verdict for q, r in found.items() if r.verdict != "agree"} == {} and found["grad_bias"].headroom > 0.1


def test_odds_are_of_likely_completions_too():
    """Where p is small log(1 - p) is nearly 0, and a loss without it nearly right: one case of twenty has p above 1/2."""
    quick = drawing.draws(drawing.cases(FAMILY, ("fp32",), "quick"), "odds", 300)
    odds = [c for c in quick if c.settings.get("method") == "orpo"]
    found = [exact(FAMILY, FAMILY.build(case)) for case in odds]
    likely = [max(float(x[name].max()) for name in ("chosen_logps", "rejected_logps")) > math.log(0.5) for x in found]
    assert sum(likely) >= len(odds) / 20 > 1
