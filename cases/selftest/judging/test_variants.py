"""Variants of a definition: a party that follows another one is told so, and nothing else is put down to one."""

import pytest
import torch

from parity.implementations.implementation import Implementation
from parity.judging import assess
from parity.registry import family, run_case

FAR = {"B": 4, "T": 1, "V": 2, "H": 1, "advantages": "zero", "beta": 0.5, "old": "absent", "ref": "far"}


def loss(x, cap, factor=1.0):
    """grpo of one token a sequence, on policy; the KL term capped at `cap` nats, the whole times `factor`."""
    logps = torch.log_softmax(x.hidden @ x.weight.T, -1).gather(-1, x.ids.long().unsqueeze(-1)).squeeze(-1)
    log_r = x.ref_logps - logps
    kl = (torch.expm1(log_r) - log_r).clamp(max=cap)
    policy = -(logps - logps.detach()).exp() * x.advantages.unsqueeze(-1)
    return {"loss": factor * (policy + x.settings.beta * kl).mean()}


def rows(settings, **how):
    party = Implementation("lib.loss", "policy", "candidate", lambda x: loss(x, **how))
    found = run_case(family("policy").case(5, "fp32", settings), [party], thorough=False)
    return {row.quantity: row for row in found if row.quantity != "protocol"}


def test_the_definition_agrees():
    assert {row.verdict for row in rows(FAR, cap=float("inf")).values()} == {"agree"}


def test_another_definition_is_named_and_nobody_is_blamed():
    found = rows(FAR, cap=10.0)
    assert set(found) == {"loss", "grad_hidden", "grad_weight"}
    assert {row.verdict for row in found.values()} == {"disagree"}
    assert {row.variant for row in found.values()} == {"capped KL"}
    assert {row.blame for row in found.values()} == {None}


@pytest.mark.parametrize("how", [{"cap": 9.0}, {"cap": 10.0, "factor": 0.75}])
def test_an_error_beside_the_variant_is_not_explained_by_it(how):
    found = rows(FAR, **how)
    assert {(row.variant, row.blame) for row in found.values() if row.verdict == "disagree"} == {(None, "candidate")}


def test_a_variant_that_computes_the_same_here_explains_nothing(monkeypatch):
    """Near the reference no cap is reached: however many replicas the second look has, the first one's word stands."""
    near = {**FAR, "ref": "near"}
    seen = []
    judge_all = assess.judge_all

    def watched(oracle, *rest, **named):
        seen.append(oracle.family.oracle)
        return judge_all(oracle, *rest, **named)

    monkeypatch.setattr(assess, "judge_all", watched)
    found = rows(near, cap=10.0, factor=0.75)
    assert found["loss"].verdict == "disagree" and found["loss"].variant is None
    assert set(seen) == {family("policy").oracle}
