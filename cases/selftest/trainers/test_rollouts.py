"""Same rollouts, other log-probs: sources that are wrong on purpose, and the split of a loss difference by hand."""

import pytest
import torch

pytest.importorskip("trl")

from parity.registry import run_case, select
from parity.trainers.catalogue import family
from parity.trainers.checks import rollouts

WINDOW = [([5, 6, 7, 8], 2), ([5, 6, 9], 2)]


def outcome(**settings):
    case = family("grpo-trainer").case(0, "fp32", settings)
    return {r.quantity: r for r in run_case(case, select(["grpo-trainer.released"]))}


def scaled(source, factor):
    score = rollouts.SCORES[source]
    return lambda *args: factor * score(*args)


def test_cut_cross_entropy_on_stored_completions():
    found = outcome(check="same-rollouts", source="cut-cross-entropy", beta=0.04)
    assert {r.verdict for r in found.values()} == {"agree"}


def test_log_probs_that_are_a_thousandth_too_large(monkeypatch):
    monkeypatch.setitem(rollouts.SCORES, "plain", scaled("plain", 1.001))
    found = outcome(check="same-rollouts", source="plain")
    assert {q for q, r in found.items() if r.verdict == "disagree"} == {f"gradient of step {i}" for i in (1, 2, 3, 4)}


def test_live_runs_are_reported(monkeypatch):
    """With log-probs a tenth too large the difference is there, most of it in the log-probs, and no gate speaks."""
    monkeypatch.setitem(rollouts.SCORES, "cut-cross-entropy", scaled("plain", 1.1))
    found = outcome(check="live-rollouts", source="cut-cross-entropy")
    assert {r.verdict for r in found.values()} == {"agree"}
    parts = {q.removeprefix("loss difference: "): r for q, r in found.items() if r.gate == "reported"}
    assert set(parts) == {"total", "log-probs", "reward and KL", "generation", "parameters"}
    assert parts["log-probs"].value > 1e-4 > parts["reward and KL"].value
    assert parts["total"].message.startswith("steps 1 to 4: 0, ")


def test_greedy_under_autocast_moves_log_probs_by_less_than_a_nat():
    """At the rate of temperature 1 a step would move a log-prob by thousands, and exp(log-ratio) would be infinite."""
    found = outcome(check="live-rollouts", sampling="greedy", precision="autocast", beta=0.04)
    assert {r.verdict for r in found.values()} == {"agree"}


def test_a_policy_that_runs_away_is_no_verdict_and_says_why(monkeypatch):
    monkeypatch.setattr(rollouts, "rate", lambda sampling: rollouts.RATE)
    found = outcome(check="live-rollouts", sampling="greedy", precision="autocast", beta=0.04)
    (row,) = found.values()
    assert row.verdict == "unsupported"
    assert "loss inf at step 2" in row.message
    assert "infinite in float32 by definition" in row.message


def test_a_loss_that_is_not_finite_without_need(monkeypatch):
    monkeypatch.setitem(rollouts.SCORES, "cut-cross-entropy", lambda *args: torch.nan * rollouts._plain(*args))
    found = outcome(check="live-rollouts", source="cut-cross-entropy", beta=0.04)
    assert {q: r.verdict for q, r in found.items()} == {"finite loss": "disagree"}
    assert "log-probs by cut-cross-entropy: loss nan at step 1" in found["finite loss"].message


def test_log_probs_move_as_at_temperature_1():
    """By hand: with L = -log p of one of two logits (z/τ), a step at rate r moves log p by 2r(1-p)²/τ² to first order."""
    moved = {}
    for sampling, options in rollouts.SAMPLING.items():
        temperature = options["temperature"]
        z = torch.zeros(2, dtype=torch.float64, requires_grad=True)
        loss = -torch.log_softmax(z / temperature, 0)[0]
        loss.backward()
        after = torch.log_softmax((z - rollouts.rate(sampling) * z.grad) / temperature, 0)[0]
        moved[sampling] = float((after + loss).detach())
    assert moved["greedy"] == pytest.approx(moved["sampled"], rel=1e-6)


def test_a_source_that_draws_from_the_generator_of_the_rollouts(monkeypatch):
    install = rollouts.install

    def drawing(trainer, source):
        install(trainer, source)
        if source != "plain":
            generate = trainer._generate

            def other(*args, **kwargs):
                torch.rand(1)
                return generate(*args, **kwargs)

            trainer._generate = other

    monkeypatch.setattr(rollouts, "install", drawing)
    found = outcome(check="live-rollouts")["first rollouts"]
    assert found.verdict == "disagree"
    assert "step 1, sequence" in found.message


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (WINDOW, None),
        ([([5, 6, 7, 3], 2), ([5, 6, 9], 2)], "step 2, sequence 0, token 1: 8, not 3"),
        ([([5, 6, 7], 2), ([5, 6, 9], 2)], "step 2, sequence 0: 2 tokens, not 1"),
    ],
)
def test_the_first_token_that_differs(other, told):
    assert rollouts.first_difference([WINDOW, WINDOW], [WINDOW, other]) == told


def test_the_parts_add_up():
    stages = ("reported", "its reference", "by definition", "on plain rollouts")
    found = [dict(zip(stages, (9.0, 7.0, 4.0, 3.0), strict=True))]
    plain = [dict(zip(stages, (1.0, 2.0, 2.5, 2.5), strict=True))]
    parts = rollouts.causes(found, plain)
    assert {n: v[0] for n, v in parts.items()} == {
        "total": 8.0,
        "log-probs": 3.0,
        "reward and KL": 3.5,
        "generation": 1.0,
        "parameters": 0.5,
    }
