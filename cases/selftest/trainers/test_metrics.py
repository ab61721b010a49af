"""What trainers log: the installed ones are right, but for online DPO's padding, which the patch mends."""

import math

import pytest

from cases.selftest.trainers.asked import planted, right, wrong

PADDED = {"objective/kl", "objective/non_score_reward", "objective/rlhf_reward", "objective/entropy"}


def test_the_fix_of_online_dpo_counts_no_padding():
    assert right("online-dpo-trainer", check="metrics", path="fixed") > PADDED


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
    assert right(trainer, check="metrics") >= set(logged.split())


def test_a_metric_that_is_nan_is_wrong():
    """TRL logs None for it, which was taken for an adapter that does not fit: nothing was compared."""

    def broken(log, self, *args, **more):
        self._metrics["train"]["entropy"] = [math.nan]
        return log(self, *args, **more)

    with planted("trl.RLOOTrainer.log", broken):
        assert wrong("rloo-trainer", "metrics") == {"entropy"}


def test_the_entropy_of_the_prompt_is_seen():
    """SFT up to 1.2 took it over the prompt too."""

    def whole(scored, model, window, *args):
        return scored(model, [(tokens, 1) for tokens, _ in window], *args)

    seen = {"entropy", "mean_token_accuracy"}
    with planted("parity.trainers.definitions.formulas.Scored", whole):
        assert wrong("sft-trainer", "metrics") == seen | {f"eval_{name}" for name in seen}


def test_sequences_whose_prompts_are_trained_on_are_all_there():
    assert "sequences" in right("sft-trainer", check="losses", loss="nll", whole=True)
