"""The divergence oracle against the definition in 50 digits and on paper."""

import dataclasses
from math import log

import mpmath as mp
import pytest
import torch

from cases.selftest.families.written_out import differences, drawn, logits, table
from parity.implementations.implementation import Implementation
from parity.judging.oracle import exact
from parity.registry import family, run_case

FAMILY = family("divergence")
IGNORE_INDEX = -100


def inputs(number):
    return drawn("divergence", 80, hard_loss=(0.0, 0.0, 0.25, 0.0, 1.0), extra_vocabulary=(0, 0, 2))[number]


class Written:
    """The definition written out with lists: its inputs can be moved by less than float64 resolves."""

    def __init__(self, x):
        self.x, self.s = x, x.settings
        self.leaf = {n: table(t) for n, t in x.tensors.items() if t is not None and t.is_floating_point()}

    def probabilities(self, z):
        top = max(z)
        weights = [mp.exp((v - top) / mp.mpf(self.s.temperature)) for v in z]
        return [w / mp.fsum(weights) for w in weights]

    def student(self, b, t):
        leaf, s = self.leaf, self.s
        return logits(leaf["hidden"][b][t], leaf["weight"], leaf.get("bias"), s.logit_scale, s.softcap)

    def pair(self, b, t):
        """Student's and teacher's probabilities at a position, over the vocabulary or the completed support."""
        s, leaf, p = self.s, self.leaf, self.probabilities(self.student(b, t))
        if s.sparse == "none":
            if "teacher_logits" in leaf:
                return p, self.probabilities(leaf["teacher_logits"][b][t][: s.V])
            head = leaf["teacher_weight"][: s.V], leaf.get("teacher_bias"), s.teacher_logit_scale, s.teacher_softcap
            return p, self.probabilities(logits(leaf["teacher_hidden"][b][t], *head))
        support = zip(self.x.support_ids[b, t], leaf["support_logps"][b][t], strict=True)
        named = [(int(i), l) for i, l in support if l > -mp.inf]
        p, q = [p[i] for i, _ in named], [mp.exp(l) for _, l in named]
        if s.tail:
            most = mp.exp(mp.mpf(-1e-7))
            return p + [1 - min(mp.fsum(p), most)], q + [1 - min(mp.fsum(q), most)]
        return [v / mp.fsum(p) for v in p], [v / mp.fsum(q) for v in q]

    def of_label(self, b, t):
        """The label's cross entropy at temperature 1."""
        z = self.student(b, t)
        return mp.log(mp.fsum(map(mp.exp, z))) - z[int(self.x.ids[b, t])]

    def loss(self):
        s, kept = self.s, self.x.ids != IGNORE_INDEX
        beta = mp.mpf(s.beta)

        def kl(a, b):
            return mp.fsum(u * mp.log(u / v) for u, v in zip(a, b, strict=True) if u > 0)

        total = mp.mpf(0)
        for b, t in kept.nonzero().tolist():
            p, q = self.pair(b, t)
            if s.beta in (0.0, 1.0):
                soft = kl(p, q) if s.beta else kl(q, p)
            else:
                m = [(1 - beta) * u + beta * v for u, v in zip(p, q, strict=True)]
                soft = beta * kl(q, m) + (1 - beta) * kl(p, m)
            hard = mp.mpf(s.hard_loss) * self.of_label(b, t) if s.hard_loss else 0
            total += (1 - mp.mpf(s.hard_loss)) * soft + hard
        count = max(int(kept.sum()), 1) if s.num_items == "none" else int(self.x.num_items_in_batch)
        return total / count


def certain(x):
    """Whether the student leaves the tail too little for float64: log(1 - Σ exp) then has few digits, or a floor."""
    s = x.settings
    if s.sparse == "none" or not s.tail:
        return False
    positions = (x.ids != IGNORE_INDEX).nonzero().tolist()
    return any(Written(x).pair(b, t)[0][-1] < mp.mpf("1e-4") for b, t in positions)


@pytest.mark.parametrize("number", range(80))
def test_values(number):
    with mp.workdps(50):
        x = inputs(number)
        truth, value = Written(x).loss(), exact(FAMILY, x)["loss"].item()
        assert abs(value - truth) <= mp.mpf("1e-8" if certain(x) else "1e-12") * (1 + abs(truth))


@pytest.mark.parametrize("number", range(40))
def test_gradient(number):
    """Central differences in 50 digits."""
    with mp.workdps(50):
        x = inputs(number)
        if certain(x):
            return
        values, found = Written(x), exact(FAMILY, x)
        upstream = mp.mpf(float(x.cotangents["loss"]))
        for name, value, quotient, largest in differences(values.leaf, found, x.leaves, number, values.loss):
            slope = upstream * quotient
            assert abs(value - slope) <= mp.mpf("1e-9") * (abs(slope) + largest + 1), name


def on_paper(beta, p, q, **settings):
    """One position whose student has probabilities p (through the bias) and whose teacher has q (as logits)."""
    shape = {"B": 1, "T": 1, "V": len(p), "H": 1, "bias": "random", "beta": beta, "teacher": "logits"}
    x = FAMILY.build(FAMILY.case(0, "fp32", shape | settings))
    return x.replace(
        hidden=torch.ones(1, 1, 1),
        weight=torch.zeros(len(p), 1),
        bias=torch.tensor(p, dtype=torch.float64).log(),
        teacher_logits=torch.tensor(q, dtype=torch.float64).log().view(1, 1, -1),
    )


HALF, SKEW = [0.5, 0.5], [0.75, 0.25]
FORWARD = 0.75 * log(1.5) + 0.25 * log(0.5)
REVERSE = 0.5 * log(2 / 3) + 0.5 * log(2)
MIDDLE = (0.75 * log(6 / 5) + 0.25 * log(2 / 3) + 0.5 * log(4 / 5) + 0.5 * log(4 / 3)) / 2  # M = (5/8, 3/8)


def test_older_mixture():
    """TRL's GKD up to 0.15: M = beta·p + (1 - beta)·q, so beta 0 is the reverse and beta 1 the forward divergence."""
    older = dataclasses.replace(FAMILY, oracle=FAMILY.variants["exchanged mixture"])
    for beta, truth in ((0.0, REVERSE), (1.0, FORWARD), (0.5, MIDDLE)):
        assert exact(older, on_paper(beta, HALF, SKEW))["loss"].item() == pytest.approx(truth, rel=1e-12)
    p, q, m = HALF, SKEW, [0.725, 0.275]
    kl = [sum(u * log(u / v) for u, v in zip(a, m, strict=True)) for a in (q, p)]
    found = exact(older, on_paper(0.1, p, q))["loss"].item()
    assert found == pytest.approx(0.1 * kl[0] + 0.9 * kl[1], rel=1e-12)


def test_a_gradient_into_the_teacher_is_seen():
    """Where it has the student's head, as in self-distillation, what nobody detached reaches the student's gradient."""
    settings = {"gap": "near", "beta": 0.5, "ignored": "some", "H": 5, "temperature": 0.7}
    case = family("divergence").case(3, "fp32", settings)

    def loss(detached):
        def call(x):
            z, w = (h @ v.T / 0.7 for h, v in ((x.hidden, x.weight), (x.teacher_hidden, x.teacher_weight)))
            p, q = z.log_softmax(-1), (w.detach() if detached else w).log_softmax(-1)
            m = torch.logaddexp(p, q) - log(2)
            terms = 0.5 * (q.exp() * (q - m) + p.exp() * (p - m)).sum(-1)
            return {"loss": terms[x.ids != -100].mean()}

        return Implementation("own", "divergence", "candidate", call)

    def failing(detached):
        rows = run_case(case, [loss(detached)], thorough=True)
        return {r.quantity for r in rows if r.failing}

    assert failing(True) == set()
    assert failing(False) == {"grad_weight"}


def test_a_softcap_bounds_what_a_bias_of_minus_inf_adds_to_a_sum():
    banned = {"B": 5, "T": 8, "temperature": 0.007, "softcap": 50.0, "teacher_bias": "banned"}
    for bias, beyond in (("banned", True), ("none", False)):
        assert FAMILY.features(FAMILY.case(1, "fp16", banned | {"bias": bias})).get("fp16 sum", False) is beyond


def test_a_flat_teacher_or_a_softcap_makes_a_large_vocabulary_nearly_equal():
    large = {"V": 70000, "peak": 50.0, "teacher_peak": 50.0}
    for more in (
        {},
        {"V": 65504, "peak": 0.1},
        {"gap": "near", "teacher_peak": 0.1},
        {"softcap": 0.5, "temperature": 0.1},
    ):
        assert not FAMILY.features(FAMILY.case(1, "fp16", large | more))["nearly equal"]
    for more in ({"peak": 0.1}, {"teacher_peak": 0.1}, {"softcap": 0.5}, {"teacher_softcap": 0.5}):
        assert FAMILY.features(FAMILY.case(1, "fp16", large | more))["nearly equal"]
