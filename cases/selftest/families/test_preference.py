"""Family `preference`: the loss by hand from log-probs, what is ignored, and what a wrong implementation of it shows."""

import math

import pytest
import torch

from cases.selftest.controls.correct import control
from cases.selftest.controls.soak import drawn
from parity.case.case import Case
from parity.errors import UsageError
from parity.families.logprobs import IGNORE_INDEX
from parity.families.preference import FAMILY, LOSS_TYPES
from parity.judging.oracle import exact
from parity.registry import load, run_case


def sides(x):
    """Log-probs of each completion by policy and reference, and their tokens, by torch's own cross entropy in float64."""
    kept = x.ids != IGNORE_INDEX

    def of(hidden, weight, bias):
        z = torch.nn.functional.linear(hidden.double(), weight.double(), None if bias is None else bias.double())
        return -torch.nn.functional.cross_entropy(z.mT, x.ids.long(), reduction="none").sum(-1)

    reference = of(x.ref_hidden, x.ref_weight, x.ref_bias) if x.ref_hidden is not None else torch.zeros(len(x.ids))
    return of(x.hidden, x.weight, x.bias), reference, kept.sum(-1)


def log1pexp(x):
    return math.log1p(math.exp(-x))


def log_odds(logp):
    return logp - math.log1p(-math.exp(logp))


@pytest.mark.parametrize(
    ("settings", "pair"),
    [
        ({"beta": 0.5}, lambda w, l, n, m: log1pexp(0.5 * (w - l))),
        ({"beta": 0.5, "average": True}, lambda w, l, n, m: log1pexp(0.5 * (w / n - l / m))),
        ({"loss_type": "hinge", "beta": 0.5}, lambda w, l, n, m: max(0.0, 1 - 0.5 * (w - l))),
        ({"loss_type": "ipo", "beta": 0.5}, lambda w, l, n, m: (w / n - l / m - 1) ** 2),
        ({"method": "cpo", "loss_type": "simpo", "beta": 2.0}, lambda w, l, n, m: log1pexp(2 * (w / n - l / m) - 0.5)),
        ({"method": "orpo"}, lambda w, l, n, m: 0.1 * log1pexp(log_odds(w / n) - log_odds(l / m))),
    ],
)
def test_a_loss_by_hand(settings, pair):
    case = Case("preference", 4, "fp32", {"B": 4, "T": 5, "V": 9, "bias": "random", "gap": "apart", **settings})
    x = FAMILY.build(case)
    logps, ref, counts = sides(x)
    d = logps - ref
    pairs = [pair(float(d[i]), float(d[i + 2]), int(counts[i]), int(counts[i + 2])) for i in range(2)]
    assert exact(FAMILY, x)["loss"].item() == pytest.approx(sum(pairs) / 2, rel=1e-9)


@pytest.mark.parametrize(
    ("settings", "score"),
    [
        ({"divergence": "forward_kl"}, lambda r: 1 - math.exp(-r)),
        ({"divergence": "js_divergence"}, lambda r: math.log(2 / (1 + math.exp(-r)))),
        ({"divergence": "alpha_divergence", "alpha": 0.3}, lambda r: (1 - math.exp(-0.3 * r)) / 0.3),
    ],
)
def test_scores_of_an_f_divergence_by_hand(settings, score):
    """f'(u) of f-DPO's table 1, u = exp(log-ratio)."""
    x = FAMILY.build(Case("preference", 4, "fp32", {"B": 2, "T": 4, "V": 9, "beta": 0.5, "peak": 0.5, **settings}))
    logps, ref, _ = sides(x)
    w, loser = (score(float(r)) for r in logps - ref)
    assert exact(FAMILY, x)["loss"].item() == pytest.approx(log1pexp(0.5 * (w - loser)), rel=1e-9)


def by_token(x):
    """Log-probs of the tokens that count, of each completion by policy and reference; and log Σ p² at each."""
    out = []
    for hidden, weight in ((x.hidden, x.weight), (x.ref_hidden, x.ref_weight)):
        table = (hidden.double() @ weight.double().T).log_softmax(-1)
        at = [(row != IGNORE_INDEX).nonzero().flatten().tolist() for row in x.ids]
        own = [[float(table[i, t, x.ids[i, t]]) for t in of] for i, of in enumerate(at)]
        squares = [[math.log(sum(math.exp(v) ** 2 for v in table[i, t])) for t in of] for i, of in enumerate(at)]
        out.append((own, squares))
    return out


@pytest.mark.parametrize("ld_alpha", [0.4, 0.0])
def test_tokens_behind_the_shorter_completion_by_hand(ld_alpha):
    """LD-DPO, arXiv 2409.06411: of the longer completion ld_alpha·log π behind the shorter one's length."""
    x = FAMILY.build(Case("preference", 6, "fp32", {"B": 2, "T": 7, "V": 9, "beta": 0.5, "ld_alpha": ld_alpha}))
    (policy, _), (reference, _) = by_token(x)
    shared = min(map(len, policy))
    assert max(map(len, policy)) > shared

    def ratio(i):
        each = [a - b for a, b in zip(policy[i], reference[i], strict=True)]
        return sum(each[:shared]) + ld_alpha * sum(each[shared:])

    assert exact(FAMILY, x)["loss"].item() == pytest.approx(log1pexp(0.5 * (ratio(0) - ratio(1))), rel=1e-9)


def test_the_weight_of_a_pair_by_hand_has_no_gradient():
    """WPO, arXiv 2406.11827, equation 2: exp of the mean of log p - log Σ p², of both completions, times the pair's loss."""
    s = {"B": 2, "T": 5, "V": 9, "beta": 0.5}
    plain, weighted = (FAMILY.build(Case("preference", 5, "fp32", s | {"weighting": w})) for w in (False, True))
    (policy, squares), _ = by_token(plain)
    means = [sum(a - b for a, b in zip(p, q, strict=True)) / len(p) for p, q in zip(policy, squares, strict=True)]
    w = math.exp(sum(means))
    assert not 0.9 < w < 1.1
    before, after = exact(FAMILY, plain), exact(FAMILY, weighted)
    assert after["loss"].item() == pytest.approx(w * before["loss"].item(), rel=1e-9)
    torch.testing.assert_close(after["grad_hidden"], w * before["grad_hidden"])


@pytest.mark.parametrize(
    "settings",
    [
        {"nll": 0.4, "reference": "none"},
        {"loss_type": "ipo", "ld_alpha": 0.4},
        {"loss_type": "sppo_hard", "weighting": True, "softcap": 3.0, "logit_scale": 0.5},
        {"loss_type": "robust", "smoothing": 0.1, "divergence": "js_divergence", "bias": "banned"},
        {"loss_type": "sigmoid_norm", "divergence": "alpha_divergence"},
        {"method": "kto", "loss_type": "kto", "kl": 0.3, "desirable": 0.7, "undesirable": 1.3, "softcap": 3.0},
        {"method": "kto", "loss_type": "apo_zero_unpaired", "reference": "none", "labels": "none"},
    ],
    ids=str,
)
def test_the_losses_of_trls_trainers_agree(settings):
    pytest.importorskip("trl")
    case = Case("preference", 4, "fp32", {"B": 4, "T": 5, "V": 9, **settings})
    name = "trl.KTOTrainer" if "method" in settings else "trl.DPOTrainer"
    rows = list(run_case(case, [load()[name]], thorough=False))
    assert {r.quantity: r.verdict for r in rows if r.verdict != "agree"} == {}
    assert {"loss", "grad_hidden", "grad_weight"} <= {r.quantity for r in rows}


def test_a_backward_pass_that_fails_is_a_crash_of_the_library():
    """TRL multiplies the output of relu by its weights in place."""
    pytest.importorskip("trl")
    case = Case("preference", 4, "fp32", {"B": 4, "weighting": True, "loss_type": "hinge"})
    (row,) = run_case(case, [load()["trl.DPOTrainer"]], thorough=False)
    assert row.verdict == "crashed" and "inplace" in row.message


def test_the_likelihood_is_of_the_chosen_tokens():
    s = {"B": 4, "T": 5, "V": 9}
    plain, more = (FAMILY.build(Case("preference", 4, "fp32", s | {"nll": nll})) for nll in (0.0, 0.4))
    logps, _, counts = sides(plain)
    nll = -float(logps[:2].sum() / counts[:2].sum())
    found = exact(FAMILY, more)
    assert found["loss"] - exact(FAMILY, plain)["loss"] == pytest.approx(0.4 * nll)
    assert found["nll_loss"] == pytest.approx(nll)


def test_kto_by_hand():
    s = {"B": 3, "T": 5, "V": 9, "method": "kto", "loss_type": "kto", "kl": 0.3, "desirable": 0.7, "undesirable": 1.3}
    x = FAMILY.build(Case("preference", 6, "fp32", s))
    logps, ref, _ = sides(x)
    assert x.labels.any() and not x.labels.all()
    terms = [
        (0.7 if good else 1.3) / (1 + math.exp((1 if good else -1) * 0.1 * (float(d) - 0.3)))
        for d, good in zip(logps - ref, x.labels, strict=True)
    ]
    assert exact(FAMILY, x)["loss"].item() == pytest.approx(sum(terms) / 3, rel=1e-9)


def test_what_is_ignored_changes_nothing():
    x = FAMILY.build(Case("preference", 4, "fp32", {"B": 4, "T": 6, "nll": 1.0}))
    ignored = (x.ids == IGNORE_INDEX).unsqueeze(-1)
    assert ignored.any() and not ignored.all(1).any()
    other = x.replace(hidden=torch.where(ignored, x.hidden + 1, x.hidden))
    assert exact(FAMILY, x)["loss"] == exact(FAMILY, other)["loss"]


@pytest.mark.parametrize(
    "wrong", [{"B": 3}, {"method": "kto"}, {"beta": 0.0}, {"loss_type": "exo_pair"}, {"smoothing": 0.5}], ids=str
)
def test_settings_without_a_meaning_are_refused(wrong):
    with pytest.raises(UsageError):
        FAMILY.build(Case("preference", 0, "fp32", wrong))


def test_every_loss_type_is_drawn_and_has_a_gradient():
    seen = set()
    for case in drawn("preference", 250, 0):
        s = FAMILY.full_settings(case)
        seen.add((s.method, s.loss_type))
    assert seen == {(m, t) for m, types in LOSS_TYPES.items() for t in types}


def test_the_edges_of_the_numbers_are_drawn():
    """beta where hinge and sigmoid are flat or straight; SimPO's margin at 0 and far out; labels of which half are wrong."""
    every = [FAMILY.full_settings(case) for case in drawn("preference", 250, 0)]
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
    odds = [c for c in drawn("preference", 300, 0, ("fp32",), "quick") if c.settings.get("method") == "orpo"]
    found = [exact(FAMILY, FAMILY.build(case)) for case in odds]
    likely = [max(float(x[name].max()) for name in ("chosen_logps", "rejected_logps")) > math.log(0.5) for x in found]
    assert sum(likely) >= len(odds) / 20 > 1
