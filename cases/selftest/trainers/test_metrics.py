"""What trainers log: the installed ones are right, but for online DPO's padding, which the patch mends."""

import math

import pytest

from cases.selftest.trainers.asked import disagreeing, verdicts
from parity.trainers.definitions import formulas
from parity.trainers.rig import drive

PADDED = {"objective/kl", "objective/non_score_reward", "objective/rlhf_reward", "objective/entropy"}


def test_the_fix_of_online_dpo_counts_no_padding():
    fixed = verdicts("online-dpo-trainer", "metrics", "fixed")
    assert disagreeing(fixed) == set()
    assert fixed.keys() > PADDED


REWARDS = "logits/chosen logits/rejected rewards/chosen rewards/rejected rewards/margins entropy"


@pytest.mark.parametrize(
    ("trainer", "logged"),
    [
        ("dpo-trainer", f"{REWARDS} rewards/accuracies"),
        ("kto-trainer", f"{REWARDS} kl logps/chosen"),
        ("sft-trainer", "entropy"),
        ("grpo-trainer", "kl entropy reward completions/mean_length"),
        ("rloo-trainer", "kl entropy reward completions/mean_length"),
    ],
)
def test_what_the_installed_trainers_log_is_judged_and_right(trainer, logged):
    found = verdicts(trainer, "metrics")
    assert disagreeing(found) == set()
    assert found.keys() >= set(logged.split())


def test_a_metric_that_is_nan_is_wrong(monkeypatch):
    """TRL logs None for it, which was taken for an adapter that does not fit: nothing was compared."""
    kind = drive.trl_class("RLOOTrainer")
    log = kind.log

    def broken(self, *args, **more):
        self._metrics["train"]["entropy"] = [math.nan]
        return log(self, *args, **more)

    monkeypatch.setattr(kind, "log", broken)
    assert disagreeing(verdicts("rloo-trainer", "metrics")) == {"entropy"}


def test_the_entropy_of_the_prompt_is_seen(monkeypatch):
    """SFT up to 1.2 took it over the prompt too."""
    seen = formulas.Scored

    def whole(model, window, *args):
        return seen(model, [(tokens, 1) for tokens, _ in window], *args)

    monkeypatch.setattr(formulas, "Scored", whole)
    wrong = {"entropy", "mean_token_accuracy"}
    assert disagreeing(verdicts("sft-trainer", "metrics")) == wrong | {f"eval_{name}" for name in wrong}


@pytest.mark.parametrize("check", ["metrics", "losses"])
def test_sequences_whose_prompts_are_trained_on_are_all_there(check):
    asked = {"loss": "nll"} if check == "losses" else {}
    assert verdicts("sft-trainer", check, whole=True, **asked)["sequences"] == "agree"
