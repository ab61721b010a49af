"""KL at step 1 of real trainers: green where they are right, red where something is lost."""

import dataclasses
import math

import pytest
import torch
from packaging.version import Version

pytest.importorskip("trl")

from cases.selftest.trainers.asked import call
from parity.case.case import Case
from parity.judge.recipe import IEEE_FP32
from parity.trainers.catalogue import family, judge
from parity.trainers.checks import step_one


@pytest.fixture(scope="module")
def honest():
    """One honest step, and its definition."""
    asked = call("grpo-trainer", "step-one", temperature=0.7)
    step = step_one.watched(asked)
    return asked, step, step_one.definition(asked, step)


def results(asked, step, truth):
    return {q.name: judge(q) for q in step_one.quantities(asked, step, truth)}


def test_an_honest_step_agrees(honest):
    assert all(r.agrees for r in results(*honest).values())


def test_one_reference_token_that_is_off_is_named(honest):
    asked, step, truth = honest
    off = step.reference.clone()
    off[1, 0] += 1e-4
    found = results(asked, dataclasses.replace(step, reference=off), truth)
    assert {q for q, r in found.items() if not r.agrees} == {"ref_logps", "log_ratio"}
    assert "sequence 1, completion token 0" in found["ref_logps"].message


@pytest.mark.parametrize("kl", [1e-5, -1e-5, math.nan])
def test_a_kl_that_is_not_zero_disagrees(honest, kl):
    asked, step, truth = honest
    found = results(asked, dataclasses.replace(step, log={**step.log, "kl": kl}), truth)
    assert not found["kl"].agrees


def test_a_loss_with_another_temperature_disagrees(honest):
    asked, step, _ = honest
    other = call("grpo-trainer", "step-one")
    found = results(asked, step, step_one.definition(other, step))
    assert not found["logps"].agrees and not found["ref_logps"].agrees


def test_no_kl_is_unsupported_never_zero(honest):
    asked, step, truth = honest
    case = Case("grpo-trainer", 0, "fp32", {"check": "step-one", "beta": 0.0})
    with pytest.raises(Exception, match=r"beta=0.0 is not among"):
        family("grpo-trainer").full_settings(case)
    with pytest.raises(step_one.Unsupported, match="no KL"):
        list(step_one.quantities(asked, dataclasses.replace(step, log={"loss": 0.0}), truth))


def test_the_kl_is_allowed_what_its_algebra_loses(honest):
    """Written expm1(d) - d it would be a hundred times less, and correct code wrong."""
    truth = honest[2]
    worst = float(truth.replicas(IEEE_FP32, 60)["kl"].abs().max())
    assert 1e-9 < worst < 1e-7


def test_rows_in_the_order_of_the_micro_batch():
    ids = torch.tensor([[1, 2], [3, 4], [5, 6]])
    logps = torch.tensor([[0.1], [0.2], [0.3]])
    assert torch.equal(step_one.in_order(ids[[2, 0]], ids, logps), logps[[2, 0]])


def test_the_bound_of_online_dpo_leaves_out_padded_prompts():
    asked = call("online-dpo-trainer", "step-one")
    step = step_one.watched(asked)
    truth = step_one.definition(asked, step)
    assert bool((step.mask[:, 0] == 0).any())  # prompts of unequal length, padded on the left
    assert all(j.agrees for j in results(asked, step, truth).values())
    off = dataclasses.replace(step, log={**step.log, "objective/kl": 1e-3}, loss=math.log(2.0) + 1e-4)
    found = results(asked, off, truth)
    assert not found["kl"].agrees and not found["loss"].agrees


@pytest.mark.parametrize(
    ("loss_types", "released", "exact"), [(True, "1.16.0", 0.0), (False, "0.16.1", -0.5), (False, "0.15.2", 0.0)]
)
def test_the_loss_at_ratio_one_is_of_the_mean_that_the_release_takes(monkeypatch, loss_types, released, exact):
    """Advantages of 1 and -1 on completions of 3 tokens and 1: 0 over sequences, 0.5 over tokens, which TRL 0.16 takes."""
    monkeypatch.setattr(step_one.trl, "since", lambda version: Version(released) >= Version(version))
    monkeypatch.setattr(step_one.trl, "fields", lambda config: {"loss_type": "grpo"} if loss_types else {})
    counted = torch.tensor([[True, True, True], [True, False, False]])
    terms = torch.tensor([[-1.0], [1.0]]).expand(2, 3)
    asked = call("grpo-trainer", "step-one")
    assert float(step_one.averaged(asked, terms, counted)) == exact
