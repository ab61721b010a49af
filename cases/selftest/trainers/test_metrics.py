"""What trainers log: the installed ones are right, but for online DPO's padding, which the patch mends."""

import pytest

from cases.selftest.trainers.asked import right

REWARDS = "logits/chosen logits/rejected rewards/chosen rewards/rejected rewards/margins entropy"
PADDED = "objective/kl objective/non_score_reward objective/rlhf_reward objective/entropy"


@pytest.mark.parametrize(
    ("trainer", "asked", "logged"),
    [
        ("dpo-trainer", {}, f"{REWARDS} rewards/accuracies"),
        ("kto-trainer", {}, f"{REWARDS} kl logps/chosen"),
        ("sft-trainer", {}, "entropy"),
        ("sft-trainer", {"check": "losses", "loss": "nll", "whole": True}, "sequences"),  # prompts are trained on
        ("grpo-trainer", {}, "kl entropy reward completions/mean_length"),
        ("rloo-trainer", {}, "kl entropy reward completions/mean_length"),
        ("online-dpo-trainer", {"path": "fixed"}, f"{PADDED} sequences"),
    ],
)
def test_what_the_installed_trainers_log_is_judged_and_right(trainer, asked, logged):
    assert right(trainer, **{"check": "metrics", **asked}) >= set(logged.split())
