"""The other trainers of TRL: log-probs by the trainer and by the model, reference and policy at step 1, gradients."""

import pytest
import torch

from cases.selftest.watching.runs import of, watched, within
from parity.fixes.logits import head_in_float32
from parity.judge.shaken import Shaken

SCORED = ("rloo-trainer", "online-dpo-trainer", "dpo-trainer", "kto-trainer", "sft-trainer")
WITH_REFERENCE = ("online-dpo-trainer", "dpo-trainer", "kto-trainer")


@pytest.mark.parametrize("trainer", SCORED)
def test_a_clean_run_is_silent(tmp_path, trainer):
    watch, lines = watched(of(trainer), tmp_path)
    assert not watch.findings and len(lines) == 2 and lines[0]["tokens"] > 15
    assert lines[0]["watch/trainer_units"] <= 3
    assert all(("watch/reference_units" in line) == (trainer in (*WITH_REFERENCE, "rloo-trainer")) for line in lines)


@pytest.mark.parametrize("trainer", SCORED)
def test_what_the_trainers_head_passes_over_is_named(tmp_path, trainer):
    made = of(trainer)
    by = torch.linspace(-1, 1, made.model.config.vocab_size)
    made.model.lm_head.register_forward_hook(lambda module, args, out: out + by.to(out))
    watch, _ = watched(made, tmp_path)
    if trainer == "online-dpo-trainer":  # it scores by the model's own logits; the reference has no such hook
        assert [f.what for f in watch.findings] == ["reference"] * 2
    else:
        cause = "what the model does in hooks of its LM head is left out"
        assert {(f.what, f.causes) for f in watch.findings} == {("trainer", (cause,))}


@pytest.mark.parametrize("trainer", WITH_REFERENCE)
def test_a_reference_of_the_same_weights_that_scores_differently(tmp_path, trainer):
    made = of(trainer, max_steps=1)
    made.ref_model.model.norm.register_forward_hook(lambda module, args, out: out * 1.1)
    watch, _ = watched(made, tmp_path)
    assert [f.what for f in watch.findings] == ["reference"]


def test_a_trainer_that_hands_out_no_log_probs_has_its_gradients_watched(tmp_path):
    made = of("cpo-trainer", max_steps=1)
    made.model.model.norm.weight.register_hook(lambda grad: grad * torch.inf)
    watch, lines = watched(made, tmp_path)
    assert [f.text for f in watch.findings] == ["watch, step 1: gradients are not finite: model.norm.weight"]
    assert [line.keys() for line in lines] == [{"step", "findings"}]
    assert [(found["what"], found["units"]) for found in lines[0]["findings"]] == [("gradient", None)]


DISTILLED = {"model": "gemma2", "max_steps": 1}
UNDIVIDED = ("loss", ("2 times too large, as if not divided by the micro-batches of an optimizer step",))


@pytest.mark.parametrize("wanted", [{"beta": 0.0}, {"beta": 0.5, "temperature": 0.7}, {"beta": 1.0}])
def test_the_loss_of_distillation_is_its_definition_by_both_models_own_logits(tmp_path, wanted):
    watch, lines = watched(of("distillation-trainer", dtype=torch.bfloat16, **DISTILLED, **wanted), tmp_path)
    assert not watch.findings and lines[0]["tokens"] > 15


def test_a_loss_of_distillation_that_is_not_divided(tmp_path):
    made = of("distillation-trainer", **DISTILLED, per_device_train_batch_size=4, gradient_accumulation_steps=2)
    original = made.compute_loss
    made.compute_loss = lambda *args, **kwargs: original(*args, **kwargs) * 2
    watch, _ = watched(made, tmp_path)
    assert [(f.what, f.causes) for f in watch.findings] == [UNDIVIDED]


def test_a_softcap_that_the_heads_of_distillation_lack(tmp_path):
    made = of("distillation-trainer", **DISTILLED)
    uncapped = within(made, "_compute_loss", made.model.config, final_logit_softcapping=None)
    watch, _ = watched(uncapped, tmp_path)
    assert [f.what for f in watch.findings] == ["loss"] and "times its definition's" in watch.findings[0].text


@pytest.mark.parametrize("wanted", [{}, {"loss_type": "ipo", "missing_eos_penalty": 1.0}])
def test_the_loss_of_online_dpo_is_its_definition_until_it_is_doubled(tmp_path, wanted):
    watch, _ = watched(of("online-dpo-trainer", **wanted), tmp_path)
    assert not watch.findings
    made = of("online-dpo-trainer", max_steps=1, **wanted)
    backward = made.accelerator.backward
    made.accelerator.backward = lambda loss, **kwargs: backward(2 * loss, **kwargs)
    watch, _ = watched(made, tmp_path)
    assert [f.what for f in watch.findings] == ["loss"] and "gradients of the log-probs" in watch.findings[0].text


def test_online_dpos_own_defect_is_named_with_its_fix(tmp_path):
    """`accelerator.backward` of TRL 1.16's step gets the loss of a micro-batch as it is."""
    made = of("online-dpo-trainer", max_steps=1, per_device_train_batch_size=4, gradient_accumulation_steps=2)
    watch, _ = watched(made, tmp_path)
    assert [(f.what, f.causes) for f in watch.findings] == [UNDIVIDED]
    assert watch.findings[0].text.endswith("; known of this stack: trl-online-dpo-accumulation, fix: `apply`")


@pytest.mark.parametrize("model", ["llama", "gemma2"])
def test_a_float32_head_moves_log_probs_by_what_is_measured(tmp_path, model):
    made = of("sft-trainer", model=model, dtype=torch.bfloat16, max_steps=1)
    ids, policy = torch.arange(3, 40, device=made.model.device)[None], made.model.eval()
    seen = []
    hook = policy.lm_head.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    with torch.no_grad():
        own = policy(input_ids=ids).logits
        with head_in_float32(policy):
            wide = policy(input_ids=ids).logits
    hook.remove()
    z = torch.nn.functional.linear(seen[0].float(), policy.lm_head.weight.float())
    cap = policy.config.get_text_config().to_dict().get("final_logit_softcapping")
    assert torch.equal(wide, z if cap is None else cap * torch.tanh(z / cap)) and "forward" not in vars(policy.lm_head)
    assert wide.dtype is torch.float32 and own.dtype is torch.bfloat16 and not torch.equal(wide, own.float())
    _, lines = watched(made, tmp_path)
    assert 0 < lines[0]["watch/float32_head"] < lines[0]["watch/noise"]
    _, lines = watched(of("sft-trainer", model=model, max_steps=1), tmp_path / "float32")
    assert "watch/float32_head" not in lines[0]
    _, lines = watched(of("sft-trainer", model=model, dtype=torch.bfloat16), tmp_path / "small", memory_budget=1000)
    assert "watch/float32_head" not in lines[0]


def test_terms_of_a_gradient_that_cancel_are_rounded_at_their_size(tmp_path):
    """β(σ'(βΔ) - σ'(βd)) of apo_down's chosen completions: near 0 after one update, each term rounded in float32."""
    watch, _ = watched(of("dpo-trainer", loss_type=["apo_down"], dtype=torch.bfloat16), tmp_path)
    assert not watch.findings


def test_how_many_tokens_an_expert_has_is_exact():
    experts = torch.tensor([0.0, 3.0, 3.0, 1.0] * 50)
    with Shaken(0):
        counted = torch.histc(experts, 4, 0, 3), experts.long().bincount()
    assert [x.tolist() for x in counted] == [[50, 50, 0, 100]] * 2
