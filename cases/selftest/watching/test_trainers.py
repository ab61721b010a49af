"""The other trainers of TRL: log-probs by the trainer and by the model, reference and policy at step 1, gradients."""

import pytest
import torch

from cases.selftest.watching.runs import of, watched

SCORED = ("rloo-trainer", "online-dpo-trainer", "dpo-trainer", "kto-trainer", "sft-trainer")
WITH_REFERENCE = ("online-dpo-trainer", "dpo-trainer", "kto-trainer")


@pytest.mark.parametrize("trainer", SCORED)
def test_a_clean_run_is_silent(tmp_path, trainer):
    watch, lines = watched(of(trainer), tmp_path)
    assert not watch.findings and len(lines) == 2 and lines[0]["tokens"] > 15
    assert lines[0]["watch/trainer_units"] <= 3
    assert ("watch/reference_units" in lines[0]) == (trainer in WITH_REFERENCE)
    assert "watch/reference_units" not in lines[1]


@pytest.mark.parametrize("trainer", SCORED)
def test_what_the_trainers_head_passes_over_is_named(tmp_path, trainer):
    made = of(trainer)
    by = torch.linspace(-1, 1, made.model.config.vocab_size)
    made.model.lm_head.register_forward_hook(lambda module, args, out: out + by.to(out.dtype))
    watch, _ = watched(made, tmp_path)
    if trainer == "online-dpo-trainer":  # it scores by the model's own logits; the reference has no such hook
        assert [f.what for f in watch.findings] == ["reference"]
    else:
        assert {(f.what, f.causes) for f in watch.findings} == {
            ("trainer", ("what the model does in hooks of its LM head is left out",))
        }


@pytest.mark.parametrize("trainer", WITH_REFERENCE)
def test_a_reference_of_the_same_weights_that_scores_differently(tmp_path, trainer):
    made = of(trainer, max_steps=1)
    made.ref_model.model.norm.register_forward_hook(lambda module, args, out: out * 1.1)
    watch, _ = watched(made, tmp_path)
    assert [f.what for f in watch.findings] == ["reference"]


def test_a_trainer_that_hands_out_no_log_probs_has_its_gradients_watched(tmp_path):
    made = of("distillation-trainer", max_steps=1)
    made.model.model.norm.weight.register_hook(lambda grad: grad * torch.nan)
    watch, lines = watched(made, tmp_path)
    assert [f.what for f in watch.findings] == ["gradient"]
    assert [line.keys() for line in lines] == [{"step", "findings"}]
