"""`use_model_logits`: heads that TRL's fused LM head gets wrong, each wrong as released, the model's own with the patch."""

import importlib

import pytest
import torch
from trl.trainer import utils as trl_utils

from parity.fixes import logits
from parity.trainers.rig import models, quantised_heads

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]
EVERY = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
TEMPERATURE = 0.7
IDS = torch.tensor([[2, 7, 9, 12, 30, 41, 5, 3], [2, 8, 22, 31, 17, 6, 50, 0]])
LABELS = IDS.masked_fill(torch.tensor([[1, 1, 1, 0, 0, 0, 0, 0], [1, 1, 1, 1, 0, 0, 0, 1]]) == 1, -100)


def halved(model):
    """A forward hook on the head, as a steering library installs; what removes it."""
    return model.get_output_embeddings().register_forward_hook(lambda module, inputs, output: 0.5 * output)


def steered(name):
    model = models.model(name)
    halved(model)
    return model


def fake_quantised(model):
    quantised_heads.quantise(model, "fake-quantised")
    return model


def four_bits(model):
    pytest.importorskip("bitsandbytes", reason="pip install 'llm-parity[kbit]'")
    quantised_heads.quantise(model, "quantised")
    return model


WRONG = {
    "softcap of another name": lambda: models.model("recurrent_gemma"),
    "prediction head": lambda: models.model("modernbert_decoder"),
    "division before the head": lambda: models.model("inkling"),
    "hook": lambda: steered("llama"),
    "hook before a softcap": lambda: steered("gemma2"),
    "fake-quantised": lambda: fake_quantised(models.model("llama")),
    "in 4 bits": lambda: four_bits(models.model("llama")),
}


def fused(model, outputs=EVERY, **settings):
    """As a trainer of TRL leaves it after construction."""
    trl_utils.add_fused_lm_head(model, temperature=TEMPERATURE, outputs=outputs, **settings)
    return model


def own(model, labels=LABELS):
    """Log-probs and entropies by the model's own logits, 0 where nothing is scored, in float64."""
    z = model(input_ids=IDS, use_cache=False).logits[:, :-1].double() / TEMPERATURE
    table, targets = torch.log_softmax(z, -1), labels[:, 1:]
    scored = targets != -100
    logps = table.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    entropies = -(table.exp() * table).sum(-1)
    return torch.where(scored, logps, 0.0), torch.where(scored, entropies, 0.0)


def asked(model, **more):
    return model(input_ids=IDS, labels=LABELS, fused_lm_head=True, **more)


def gradients(scalar, model):
    found = torch.autograd.grad(scalar, [p for p in model.parameters() if p.requires_grad], allow_unused=True)
    return torch.cat([g.flatten() for g in found if g is not None])


@pytest.mark.parametrize("name", WRONG)
def test_a_head_that_is_more_than_its_weight(name):
    model = fused(WRONG[name]().train())
    want, entropies = own(model)
    if name == "in 4 bits":
        with pytest.raises(RuntimeError, match="cannot be multiplied"):
            asked(model)
    else:
        assert (asked(model).log_probs - want).abs().max() > 1e-3
    with logits.use_model_logits(model) as patch:
        assert patch.changed[0].startswith(type(model).__name__)
        found = asked(model)
        torch.testing.assert_close(found.log_probs.double(), want, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found.entropy.double(), entropies, rtol=1e-5, atol=1e-5)
        scalar = (found.log_probs * 0.3 + found.entropy * 0.2).sum()
        exact = (want * 0.3 + entropies * 0.2).sum()
        torch.testing.assert_close(gradients(scalar, model), gradients(exact, model), rtol=1e-4, atol=1e-4)
        assert "already applied" in logits.use_model_logits(model).reason
        # generation and everything else still goes the model's own way
        assert torch.equal(model(input_ids=IDS).logits, model(input_ids=IDS, fused_lm_head=False).logits)
    if name != "in 4 bits":
        assert (asked(model).log_probs - want).abs().max() > 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma2", "gemma3", "gemma4", "cohere", "granite", "phi"])
def test_nothing_is_done_where_the_head_is_its_weight(name, dtype):
    model = fused(models.model(name).to(dtype).train())
    patch = logits.use_model_logits(model)
    assert not patch
    assert f"computes the logits of {type(model).__name__} itself" in patch.reason


@pytest.mark.parametrize("name", ["recurrent_gemma", "modernbert_decoder", "inkling"])
def test_it_is_seen_in_bfloat16(name):
    assert logits.use_model_logits(fused(models.model(name).to(torch.bfloat16)))


def test_a_hook_is_seen_in_bfloat16_and_the_head_may_be_cast():
    model = fused(steered("llama").to(torch.bfloat16), cast_lm_head_to_fp32=True)
    trainer = type("Trainer", (), {"model": model, "ref_model": None, "args": type("Args", (), {})})
    trainer.args.cast_lm_head_to_fp32 = True
    with logits.use_model_logits(trainer):
        with torch.no_grad():
            hidden = model.model(input_ids=IDS, use_cache=False).last_hidden_state[:, :-1].float()
            z = 0.5 * (hidden.double() @ model.lm_head.weight.double().T) / TEMPERATURE
            found = asked(model).log_probs
        want = torch.log_softmax(z, -1).gather(-1, LABELS[:, 1:].clamp(min=0).unsqueeze(-1)).squeeze(-1)
        scored = LABELS[:, 1:] != -100
        torch.testing.assert_close(found[scored].double(), want[scored], rtol=1e-5, atol=1e-5)
    assert "forward" not in vars(model.lm_head)


def agreeing(name="llama"):
    """A model on our path whose head is plain again, so that TRL's kernel says what each field must be."""
    model = models.model(name).train()
    hook = halved(model)
    patch = logits.use_model_logits(fused(model))
    assert patch
    hook.remove()
    return model, patch


def test_every_field_is_what_the_kernel_computes():
    model, patch = agreeing()
    shifted = torch.nn.functional.pad(LABELS[:, 1:], (0, 1), value=-100)
    nothing = {"labels": torch.full_like(LABELS, -100)}
    calls = [{"labels": LABELS}, {"shift_labels": shifted}, {"labels": LABELS, "num_items_in_batch": 7}, nothing]
    ours = [model(input_ids=IDS, fused_lm_head=True, **c) for c in calls]
    patch.undo()
    theirs = [model(input_ids=IDS, fused_lm_head=True, **c) for c in calls]
    for mine, want in zip(ours, theirs, strict=True):
        assert set(mine) == set(want)
        for field, value in want.items():
            assert mine[field].dtype == value.dtype, field
            torch.testing.assert_close(mine[field], value, rtol=1e-5, atol=1e-5, msg=lambda m, f=field: f"{f}: {m}")
    assert not gradients(ours[3].loss, model).any()


def test_the_routers_loss_comes_along():
    model, patch = agreeing("qwen3_moe")
    mine = asked(model, output_router_logits=True)
    patch.undo()
    want = asked(model, output_router_logits=True)
    assert want.aux_loss > 0
    for field in ("aux_loss", "loss"):
        torch.testing.assert_close(mine[field], want[field], rtol=1e-5, atol=1e-5)


def test_confident_and_forbidden_tokens_keep_value_and_gradient():
    z = torch.tensor([[0.0, -40.0, -torch.inf], [-torch.inf, 3.0, -torch.inf]], requires_grad=True)
    kept, ids = torch.tensor([True, True]), torch.tensor([0, 1])
    logps, entropy = logits._score(z, kept, ids, 1.0, ("entropy",))
    assert logps[0].item() == pytest.approx(-4.248e-18, rel=1e-3)
    assert logps[1] == 0
    assert entropy.isfinite().all()
    (gradient,) = torch.autograd.grad(logps.sum() + entropy.sum(), z)
    assert gradient.isfinite().all()
    assert gradient[0, 1] != 0


def test_the_probe_leaves_no_trace():
    torch.manual_seed(5)
    model = models.model("gemma2").train()
    model.lm_head.register_buffer("seen", torch.zeros(()))
    model.lm_head.register_forward_hook(lambda module, inputs, output: module.seen.add_(1) and None)
    model.model.layers[0].eval()
    modes, state = [m.training for m in model.modules()], torch.random.get_rng_state()
    assert not logits.use_model_logits(fused(model))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert [m.training for m in model.modules()] == modes
    assert model.lm_head.seen == 0
    assert trl_utils._ChunkedLogProbFunction is importlib.import_module("trl.kernels").ChunkedLogProbFunction


def test_dropout_is_no_difference():
    model = models.model("phi").train()
    for layer in model.model.layers:
        layer.resid_dropout.p = 0.5
    assert not logits.use_model_logits(fused(model))


@pytest.fixture
def fresh_accelerator():
    """accelerate keeps one state for a process: other tests' must not decide the precision here, nor ours theirs."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def test_it_is_taken_back_under_autocast_that_came_later(fresh_accelerator):
    import accelerate

    model = fused(steered("llama"))
    released = asked(model).log_probs
    patch = logits.use_model_logits(model)
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    model = accelerator.prepare_model(model, evaluation_mode=True)
    assert (asked(model).log_probs - released).abs().max() > 0.5
    assert "already applied" in logits.use_model_logits(model).reason
    patch.undo()
    assert (asked(model).log_probs - released).abs().max() < 0.5
    assert logits.use_model_logits(model)


def test_a_model_that_cannot_be_tried_is_left_alone(monkeypatch):
    model = fused(steered("llama"))
    forward = model.forward
    monkeypatch.setattr(logits, "probe", lambda model: {"input_ids": torch.full((1, 4), 10**6)})
    assert "LlamaForCausalLM could not be tried (IndexError" in logits.use_model_logits(model).reason
    assert model.forward == forward
    assert "no model has a fused LM head" in logits.use_model_logits(models.model("llama")).reason
