"""Scoring of stored completions, against trainers that are wrong on purpose: each fault shows in the quantity it is about."""

import pytest
import torch

pytest.importorskip("trl")

from cases.selftest.trainers.asked import disagreeing, verdicts
from parity.trainers.checks import scoring


def outcome(**settings):
    return verdicts("grpo-trainer", "scoring", **settings)


def altered(monkeypatch, change):
    """The trainer with its scoring exchanged: `change(score)` is called instead."""
    build = scoring._built

    def built(call):
        trainer = build(call)
        score = trainer._get_per_token_logps_and_entropies
        trainer._get_per_token_logps_and_entropies = change(score)
        return trainer

    monkeypatch.setattr(scoring, "_built", built)


def test_a_batch_size_that_is_ignored(monkeypatch):
    def change(score):
        return lambda *args, batch_size=None, compute_entropy=False: score(*args, compute_entropy=compute_entropy)

    altered(monkeypatch, change)
    assert disagreeing(outcome(batch="3")) == {"calls"}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_mask_of_other_rows(monkeypatch, dtype):
    """Every chunk is given the attention mask of the rows before: the head is right, the model under it is not."""

    def change(score):
        def scored(model, ids, mask, kept, batch_size=None, compute_entropy=False):
            return score(model, ids, mask.roll(1, 0), kept, batch_size=batch_size, compute_entropy=compute_entropy)

        return scored

    altered(monkeypatch, change)
    assert "gradient" in disagreeing(outcome(batch="1", dtype=dtype))


def test_a_head_in_another_precision_than_told(monkeypatch):
    """The cast claimed and not made: what bfloat16 tiles lose stands out against a head in float32."""
    recipe = scoring._recipe
    monkeypatch.setattr(
        scoring, "_recipe", lambda s, calls: recipe(type(s)(**{**vars(s), "cast_lm_head_to_fp32": True}), calls)
    )
    assert {"head: logps", "head: entropy"} <= disagreeing(outcome(dtype="bf16"))


def test_a_gradient_scaled_by_one_percent(monkeypatch):
    import trl.trainer.utils as utils

    if not hasattr(utils, "_ChunkedLogProbFunction"):
        pytest.skip("this TRL scores the model's own logits")
    backward = utils._ChunkedLogProbFunction.backward

    def scaled(ctx, *slopes):
        return tuple(1.01 * g if torch.is_tensor(g) else g for g in backward(ctx, *slopes))

    monkeypatch.setattr(utils._ChunkedLogProbFunction, "backward", staticmethod(scaled))
    found = disagreeing(outcome(dtype="bf16"))  # that of the whole model is near its limit
    assert found - {"gradient"} == {"head: grad_hidden", "head: grad_weight"}
