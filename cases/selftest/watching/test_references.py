"""References, right and wrong ones."""

import torch

from cases.selftest.watching.runs import grpo, of, watched


def found(watch):
    return [(f.what, *f.causes) for f in watch.findings]


def test_a_reference_is_judged_by_its_own_noise(tmp_path):
    """A policy that has become sure of its tokens has less."""
    watch, lines = watched(grpo(dtype=torch.bfloat16, learning_rate=0.05, beta=0.01, max_steps=7), tmp_path)
    assert not watch.findings and len(lines) == 7
    assert all(line["watch/reference_units"] <= 1 for line in lines)


def test_a_reference_that_is_the_policy_is_seen_once(tmp_path):
    trainer = of("dpo-trainer", max_steps=1)
    trainer.ref_model = trainer.model
    watch, _ = watched(trainer, tmp_path)
    assert [f.what for f in watch.findings] == ["update"]
    assert "the optimizer's step moves the reference too" in watch.findings[0].text


def test_pairs_that_are_turned_round_within_the_loss(tmp_path):
    trainer = of("dpo-trainer", max_steps=1)
    original, names = trainer._compute_loss, ("input_ids", "attention_mask", "completion_mask")

    def turned(model, inputs, *args):
        return original(model, inputs | {n: torch.cat(inputs[n].chunk(2)[::-1]) for n in names}, *args)

    trainer._compute_loss = turned
    watch, _ = watched(trainer, tmp_path)
    assert found(watch) == [("loss", "-1 times the definition's")]
