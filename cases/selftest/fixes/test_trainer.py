"""`apply` on real trainers: what it picks, that the fixed trainer trains, and that everything can be taken back."""

import pytest
import torch
from trl.trainer import utils

from fixtures import training
from parity.fixes import apply, kernel, wiring
from parity.upstream import trl

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]


@pytest.fixture
def counted(monkeypatch):
    """How often the fused head asked us for log-probs."""
    calls = []
    ours = kernel.selective_log_probs
    monkeypatch.setattr(kernel, "selective_log_probs", lambda *a, **k: calls.append(k) or ours(*a, **k))
    return calls


def test_a_trainer_trains_with_our_log_probs_as_without(counted):
    """Softcap, temperature, accumulation, ragged completions, old log-probs, entropy bonus: equal in float32."""
    theirs = utils._ChunkedLogProbFunction
    settings = {"entropy_coef": 0.05, "top_entropy_quantile": 0.8}
    plain = training.trained(training.trainer(training.model(), **settings))
    assert not counted
    made = training.trainer(training.model(), **settings)
    with apply(made) as applied:
        assert applied
        assert applied["use_selective_log_probs"].changed == ("Gemma2ForCausalLM.forward",)
        assert "no fused loss" in applied["use_fused_policy_loss"].reason
        assert not apply(made)
        ours = training.trained(made)
    assert utils._ChunkedLogProbFunction is theirs
    assert len(counted) >= 4
    assert {k["softcap"] for k in counted} == {training.SOFTCAP}
    assert {k["temperature"] for k in counted} == {0.8}
    for mine, want in zip(ours, plain, strict=True):
        assert mine.get("completions/mean_length") == want.get("completions/mean_length")
        for name in ("loss", "grad_norm", "entropy"):
            assert mine[name] == pytest.approx(want[name], rel=1e-4, abs=1e-6), name
    assert plain[0]["completions/mean_length"] < 12
    assert plain[0]["grad_norm"] > 0.01


def test_a_head_in_modules_to_save_trains_with_our_log_probs_as_without(counted):
    """LoRA that trains a copy of the head: the copy scores the policy, the base's head the reference; equal in float32."""
    lora = trl.lora(modules_to_save=["lm_head"])

    def trained(applied):
        torch.manual_seed(0)
        made = training.trainer(training.model(), peft_config=lora, beta=0.04)
        if applied:
            said = apply(made)
            assert said["use_selective_log_probs"].changed == ("Gemma2ForCausalLM.forward",)
        logged = training.trained(made)
        return logged, {n: p.detach().clone() for n, p in made.model.named_parameters() if p.requires_grad}

    plain, expected = trained(False)
    assert not counted
    ours, found = trained(True)
    assert len(counted) >= 4 and any("modules_to_save" in name for name in found)
    assert ours[0]["kl"] == 0.0 < ours[-1]["kl"], "the head that is trained has moved away from the reference's"
    for mine, want in zip(ours, plain, strict=True):
        for name in ("loss", "grad_norm", "kl"):
            assert mine[name] == pytest.approx(want[name], rel=1e-4, abs=1e-6), name
    for name, weight in expected.items():
        assert torch.allclose(found[name], weight, rtol=1e-4, atol=1e-5), name


def frozen_inputs():
    policy = training.model()
    policy.get_input_embeddings().requires_grad_(False)
    # transformers 5 adds an input hook of its own when checkpointing is turned on; older ones do not.
    policy.enable_input_require_grads = lambda *_: None
    return policy


def test_what_fails_leaves_nothing_behind(monkeypatch):
    made = training.trainer(
        frozen_inputs(), gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": True}
    )

    def broken(trainer):
        raise RuntimeError("no")

    monkeypatch.setattr(wiring, "use_fused_policy_loss", broken)
    with pytest.raises(RuntimeError, match="no"):
        apply(made)
    assert "forward" not in vars(made.model.get_input_embeddings())
    monkeypatch.undo()
    with apply(made) as applied:
        assert applied["use_selective_log_probs"]
    assert str(applied).count("\n") == len(applied.patches) - 1


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("SFTTrainer", "the trainer also takes is_top1 of TRL's kernel"),
        ("DPOTrainer", "the trainer also takes is_top1, mean_logits of TRL's kernel"),
        ("CPOTrainer", "no model of the trainer has a fused LM head"),
    ],
)
def test_a_trainer_that_needs_nothing_is_left_alone(name, reason):
    """Nothing of the process is rebound for it, and one kernel scores its policy and its reference."""
    from parity.trainers.rig import drive, models

    theirs = utils._ChunkedLogProbFunction
    with apply(drive.build(name, models.model("llama"), {"gradient_checkpointing": False})) as applied:
        assert applied.changed == (applied["average_over_window"].changed if name == "CPOTrainer" else ())
        assert applied["use_selective_log_probs"].reason == reason
        assert utils._ChunkedLogProbFunction is theirs
