"""Config values and heads that hide: real trainers held against the model's own logits."""

import pytest

pytest.importorskip("trl")

from cases.selftest.trainers.asked import rows


def test_a_value_that_the_trainer_misses_is_red_and_names_the_token(monkeypatch):
    import trl.trainer.utils as utils

    if not hasattr(utils, "add_fused_lm_head"):
        pytest.skip("this TRL scores the model's own logits")
    monkeypatch.setattr(utils._ChunkedLogProbFunction, "apply", _without_softcap(utils._ChunkedLogProbFunction.apply))
    found = rows("grpo-trainer", "config-values", model="gemma2")
    assert found["logps"].verdict == found["gradient"].verdict == "disagree"
    assert "by the model's own logits" in found["logps"].message
    assert "first model.embed_tokens.weight" in found["gradient"].message


def _without_softcap(apply):
    def called(hidden, weight, bias, targets, temperature, chunk, softcap, *rest):
        return apply(hidden, weight, bias, targets, temperature, chunk, None, *rest)

    return called


def test_a_head_that_cannot_be_honoured_is_refused_not_ignored():
    found = rows("grpo-trainer", "config-values", head="lora")
    assert [r.verdict for r in found.values()] == ["refused"]


def test_a_head_that_this_machine_cannot_make_is_unsupported_with_the_remedy(monkeypatch):
    from parity.trainers.rig import quantised_heads

    monkeypatch.setattr(quantised_heads, "_installed", lambda name: False)
    found = rows("grpo-trainer", "config-values", head="quantised")
    assert "pip install" in found[None].message and found[None].verdict == "unsupported"


def test_a_hook_on_the_head_is_found_with_our_fix():
    found = rows("grpo-trainer", "config-values", "fixed", head="hook")
    assert {q: r.verdict for q, r in found.items()} == {"logps": "agree", "gradient": "agree"}
