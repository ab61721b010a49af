"""Gradient flow on real trainers: red where parameters are dead, green with our fix."""

import pytest

pytest.importorskip("trl")

from cases.selftest.trainers.asked import rows


@pytest.mark.parametrize("trained", ["frozen-embeddings", "lora"])
def test_dead_parameters_are_listed_and_our_fix_revives_them(monkeypatch, trained):
    from transformers import PreTrainedModel

    # What TRL before 0.16 and transformers of its day left out: the hook on the input embeddings.
    monkeypatch.setattr(PreTrainedModel, "enable_input_require_grads", lambda self: None)
    released = rows("grpo-trainer", "gradient-flow", trained=trained)
    assert released["gradients"].verdict == "disagree"
    assert "layers.0.self_attn.q_proj" in released["gradients"].message
    assert released["learning rate has an effect"].verdict == "disagree"
    fixed = rows("grpo-trainer", "gradient-flow", "fixed", trained=trained)
    assert all(r.verdict == "agree" for r in fixed.values())
