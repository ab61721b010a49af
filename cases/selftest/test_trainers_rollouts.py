"""Same rollouts, other log-probs: sources that are wrong on purpose, and the split of a loss difference by hand."""

import pytest

pytest.importorskip("trl")

from parity.implementations import select
from parity.run import run_case
from parity.trainers import family, rollouts

WINDOW = [([5, 6, 7, 8], 2), ([5, 6, 9], 2)]


def outcome(**settings):
    case = family("grpo-trainer").case(0, "fp32", settings)
    return {r["quantity"]: r for r in run_case(case, select(["grpo-trainer.released"]))}


def scaled(source, factor):
    score = rollouts.SCORES[source]
    return lambda *args: factor * score(*args)


def test_cut_cross_entropy_on_stored_completions():
    found = outcome(check="same-rollouts", source="cut-cross-entropy", beta=0.04)
    assert {r["verdict"] for r in found.values()} == {"agree"}


def test_log_probs_that_are_a_thousandth_too_large(monkeypatch):
    monkeypatch.setitem(rollouts.SCORES, "plain", scaled("plain", 1.001))
    found = outcome(check="same-rollouts", source="plain")
    assert {q for q, r in found.items() if r["verdict"] == "disagree"} == {
        f"gradient of step {i}" for i in (1, 2, 3, 4)
    }


def test_live_runs_are_reported(monkeypatch):
    """With log-probs a tenth too large the difference is there, most of it in the log-probs, and no gate speaks."""
    monkeypatch.setitem(rollouts.SCORES, "cut-cross-entropy", scaled("plain", 1.1))
    found = outcome(check="live-rollouts", source="cut-cross-entropy")
    assert {r["verdict"] for r in found.values()} == {"agree"}
    parts = {q.removeprefix("loss difference: "): r for q, r in found.items() if r["gate"] == "reported"}
    assert set(parts) == {"total", "log-probs", "reward and KL", "generation", "parameters"}
    assert parts["log-probs"]["value"] > 1e-4 > parts["reward and KL"]["value"]
    assert parts["total"]["message"].startswith("steps 1 to 4: 0, ")


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

    import torch

    monkeypatch.setattr(rollouts, "install", drawing)
    found = outcome(check="live-rollouts")["first rollouts"]
    assert found["verdict"] == "disagree"
    assert "step 1, sequence" in found["message"]


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
