"""The runtime patches on real libraries: what upstream does first (so that each test can fail), then what we do."""

import contextlib
import functools
import importlib
import logging
import sys
import types

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from parity.fixes import patch as patch_module
from parity.fixes import patches

transformers = pytest.importorskip("transformers")


def tiny_model(dtype=torch.float32):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=32, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).to(dtype).train()


IDS = torch.arange(1, 13).reshape(2, 6)


def loss_of(model):
    return model(input_ids=IDS, labels=IDS).loss


class OwnCheckpointing:
    """A model's own checkpointing: it counts its calls, and leaves the middle layer out."""

    def __init__(self, model):
        self.calls, self.layers = 0, model.model.layers
        for index, layer in enumerate(self.layers):
            layer.gradient_checkpointing = index != 1
            layer._gradient_checkpointing_func = self

    def __call__(self, function, *args):
        self.calls += 1
        return checkpoint(function, *args, use_reentrant=False)

    def state(self):
        return [(layer.gradient_checkpointing, layer._gradient_checkpointing_func is self) for layer in self.layers]


KEPT = [(True, True), (False, True), (True, True)]


@pytest.fixture(scope="module")
def trl_utils():
    pytest.importorskip("trl")
    importlib.import_module("trl.trainer.grpo_trainer")
    return importlib.import_module("trl.models.utils")


@pytest.fixture
def clean():
    """Whatever a test leaves patched is taken back."""
    with contextlib.ExitStack() as stack:
        yield stack


def hooks_on(model):
    return len(model.get_input_embeddings()._forward_hooks)


def test_upstream_overwrites_checkpointing(trl_utils):
    """The control: without the patch the model's own function is gone after one generation."""
    model = tiny_model()
    own = OwnCheckpointing(model)
    with pytest.warns(FutureWarning), trl_utils.disable_gradient_checkpointing(model, {}):
        pass
    assert own.state() != KEPT


def test_generation_keeps_checkpointing(trl_utils, clean):
    grpo = sys.modules["trl.trainer.grpo_trainer"]
    original = grpo.disable_gradient_checkpointing
    generated = types.ModuleType("generated_cache_outside_trl")
    generated.disable_gradient_checkpointing = original
    sys.modules[generated.__name__] = generated
    clean.callback(sys.modules.pop, generated.__name__)

    patch = clean.enter_context(patches.keep_gradient_checkpointing())
    assert patch
    assert patch.reason is None
    assert len(patch) == len(patch.changed) >= 5
    for module in ("trl.models.utils", "trl.trainer.grpo_trainer", generated.__name__):
        assert f"{module}.disable_gradient_checkpointing" in patch.changed
    assert "trl.trainer.grpo_trainer.unwrap_model_for_generation" in patch.changed

    model = tiny_model()
    own, hooks = OwnCheckpointing(model), hooks_on(model)
    for module in (grpo, generated):
        with torch.no_grad(), module.disable_gradient_checkpointing(model, {"use_reentrant": False}):
            assert not any(layer.gradient_checkpointing for layer in model.model.layers)
            model(input_ids=IDS)
        assert own.state() == KEPT
        assert own.calls == 0
    loss_of(model).backward()
    assert own.calls == 2
    assert hooks_on(model) == hooks

    patch.undo()
    assert grpo.disable_gradient_checkpointing is original is generated.disable_gradient_checkpointing
    patch.undo()
    assert trl_utils.disable_gradient_checkpointing is original


def test_modules_imported_later_take_the_replacement(trl_utils, clean):
    original = trl_utils.disable_gradient_checkpointing
    held = {name: sys.modules.pop(name) for name in list(sys.modules) if name.startswith("trl.trainer.rloo")}
    with patches.keep_gradient_checkpointing():
        later = importlib.import_module("trl.trainer.rloo_trainer")
        assert later.disable_gradient_checkpointing is trl_utils.disable_gradient_checkpointing is not original
    assert later.disable_gradient_checkpointing is original
    sys.modules.update(held)


def test_unwrapping_for_generation_keeps_checkpointing(trl_utils, clean):
    accelerator = pytest.importorskip("accelerate").Accelerator(cpu=True)
    model = tiny_model()
    own, hooks = OwnCheckpointing(model), hooks_on(model)
    clean.enter_context(patches.keep_gradient_checkpointing())
    grpo = sys.modules["trl.trainer.grpo_trainer"]
    with grpo.unwrap_model_for_generation(model, accelerator, gradient_checkpointing_kwargs={}) as unwrapped:
        assert unwrapped is model
        assert not any(layer.gradient_checkpointing for layer in model.model.layers)
    assert own.state() == KEPT
    assert hooks_on(model) == hooks
    clean.close()
    with pytest.warns(FutureWarning), grpo.unwrap_model_for_generation(model, accelerator):
        pass
    assert own.state() != KEPT


def test_flags_come_back_after_an_error(trl_utils, clean):
    clean.enter_context(patches.keep_gradient_checkpointing())
    model = tiny_model()
    own = OwnCheckpointing(model)
    with pytest.raises(RuntimeError, match="out of memory"), trl_utils.disable_gradient_checkpointing(model):
        raise RuntimeError("out of memory")
    assert own.state() == KEPT


def test_applying_twice_is_harmless_and_logged_once(trl_utils, clean, caplog, monkeypatch):
    monkeypatch.setattr(patch_module, "_logged", set())
    with caplog.at_level(logging.INFO, "parity.fixes"):
        first = clean.enter_context(patches.keep_gradient_checkpointing())
        replacement = trl_utils.disable_gradient_checkpointing
        with patches.keep_gradient_checkpointing() as second, patches.keep_gradient_checkpointing() as third:
            assert not second
            assert not third
            assert second.reason == "already applied"
    assert trl_utils.disable_gradient_checkpointing is replacement
    assert len(caplog.records) == 2
    assert len(first) > 0


def test_unwrapping_is_kept_from_overwriting_where_trl_has_no_switch(trl_utils, monkeypatch, clean):
    monkeypatch.delattr(trl_utils, "disable_gradient_checkpointing")  # trl 0.22 to 0.25
    original = trl_utils.unwrap_model_for_generation
    patch = clean.enter_context(patches.keep_gradient_checkpointing())
    assert "trl.models.utils.unwrap_model_for_generation" in patch.changed
    assert trl_utils.unwrap_model_for_generation is not original
    with patches.keep_gradient_checkpointing() as again:
        assert again.reason == "already applied"


def test_nothing_to_keep_where_trl_is_right(trl_utils, monkeypatch):
    @contextlib.contextmanager
    def harmless(model, *args, **kwargs):
        yield

    monkeypatch.setattr(trl_utils, "disable_gradient_checkpointing", harmless)
    monkeypatch.setattr(trl_utils, "unwrap_model_for_generation", harmless)
    patch = patches.keep_gradient_checkpointing()
    assert not patch
    assert "no longer overwrite" in patch.reason


def test_nothing_to_keep_without_trl(monkeypatch):
    monkeypatch.setitem(sys.modules, "trl.models.utils", None)
    patch = patches.keep_gradient_checkpointing()
    assert not patch
    assert "trl cannot be imported" in patch.reason


def multimodal(softcap=30.0, **top):
    config = transformers.Gemma3Config(text_config={"final_logit_softcapping": softcap, "num_hidden_layers": 1})
    for name, value in top.items():
        setattr(config, name, value)
    return config


def test_nested_softcap_is_lifted_and_put_back():
    config = multimodal()
    assert getattr(config, "final_logit_softcapping", 0) == 0  # what RL code reads
    model = types.SimpleNamespace(config=config)
    patch = patches.lift_text_config_attributes(model)
    assert patch
    assert config.final_logit_softcapping == 30.0
    assert patch.changed == ("config.final_logit_softcapping=30.0",)
    assert not patches.lift_text_config_attributes(model)
    patch.undo()
    assert not hasattr(config, "final_logit_softcapping")
    with patches.lift_text_config_attributes(torch.nn.DataParallel(tiny_model())) as other:
        assert not other
        assert "no nested text config" in other.reason


@pytest.mark.parametrize("value", [None, 0.0, 50.0])
def test_lifting_never_overwrites(value):
    config = multimodal(final_logit_softcapping=value)
    patch = patches.lift_text_config_attributes(config)
    assert not patch
    assert config.final_logit_softcapping == value


def test_nothing_to_lift():
    patch = patches.lift_text_config_attributes(multimodal(softcap=None))
    assert not patch
    assert "only in the nested text config" in patch.reason
    config = multimodal()
    config.text_config.my_scale = 0.25
    assert patches.lift_text_config_attributes(config, names=("my_scale",))
    assert config.my_scale == 0.25


def checkpointed(model, reentrant=True):
    model._set_gradient_checkpointing(True, functools.partial(checkpoint, use_reentrant=reentrant))
    return model


def frozen_embeddings(model):
    model.get_input_embeddings().requires_grad_(False)
    return model


def trained_layers(model):
    model.zero_grad(set_to_none=True)
    loss_of(model).backward()
    return [n for n, p in model.named_parameters() if ".layers." in n and p.grad is not None and p.grad.abs().sum() > 0]


def plain_gradients():
    model = frozen_embeddings(tiny_model())
    loss_of(model).backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("wrapped", [False, True], ids=["model", "trainer"])
def test_frozen_inputs_train_under_reentrant_checkpointing(wrapped):
    model = checkpointed(frozen_embeddings(tiny_model()))
    assert trained_layers(model) == []
    trainer = types.SimpleNamespace(model=model, args=None, optimizer=None)
    patch = patches.require_input_grads(trainer if wrapped else model)
    assert patch
    assert patch.model is model
    loss_of_names = trained_layers(model)
    assert loss_of_names
    for name, want in plain_gradients().items():
        torch.testing.assert_close(dict(model.named_parameters())[name].grad, want)
    again = patches.require_input_grads(model)
    assert not again
    assert "requires a gradient already" in again.reason
    patch.undo()
    again.undo()
    assert trained_layers(model) == []


def test_no_hook_where_none_is_needed():
    assert "checkpointing is off" in patches.require_input_grads(frozen_embeddings(tiny_model())).reason
    calm = checkpointed(frozen_embeddings(tiny_model()), reentrant=False)
    assert "not reentrant" in patches.require_input_grads(calm).reason
    assert trained_layers(calm)
    assert "already" in patches.require_input_grads(checkpointed(tiny_model())).reason
    nothing = checkpointed(tiny_model().requires_grad_(False))
    assert "no trainable parameter" in patches.require_input_grads(nothing).reason
    assert all(hooks_on(m) == 0 for m in (calm, nothing))


def test_a_trainer_that_will_turn_checkpointing_on():
    args = types.SimpleNamespace(gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": True})
    trainer = types.SimpleNamespace(model=frozen_embeddings(tiny_model()), args=args, optimizer=None)
    patch = patches.require_input_grads(trainer)
    assert patch
    assert trained_layers(checkpointed(trainer.model))
    args.gradient_checkpointing_kwargs = {"use_reentrant": False}
    patch.undo()
    assert "not reentrant" in patches.require_input_grads(trainer).reason


def lora(peft, target):
    return peft.LoraConfig(r=2, lora_alpha=4, target_modules=[target], init_lora_weights=False, task_type="CAUSAL_LM")


def already_adapted(peft):
    return peft.get_peft_model(tiny_model(torch.bfloat16), lora(peft, "v_proj"))


def problems(model, logits_before, peft, slack=0.03):
    """What is wrong with a model after the PEFT steps; empty when it trains as it should. `slack` is for the logits."""
    found = []
    if not isinstance(model, peft.PeftModel):
        found.append("no adapter")
    elif any("v_proj.lora" in n for n, _ in model.named_parameters()):
        found.append("the old adapter is still there")
    if any(p.is_floating_point() and p.dtype != torch.float32 for p in model.parameters()):
        found.append("16-bit parameters")
    if any(p.requires_grad != ("lora" in n) for n, p in model.named_parameters()):
        found.append("the wrong parameters are trainable")
    with contextlib.suppress(AttributeError), torch.no_grad(), model.disable_adapter():
        if not torch.allclose(model(input_ids=IDS).logits.float(), logits_before.float(), atol=slack):
            found.append("other logits")
    if not all(layer.gradient_checkpointing for layer in model.get_decoder().layers):
        found.append("no checkpointing")
    with contextlib.suppress(RuntimeError):
        if len(trained_layers(model)) == 6:
            return found
    return [*found, "no gradients"]


OMITTED = [
    (None, []),
    ("merge", ["the old adapter is still there"]),
    ("prepare", ["16-bit parameters"]),
    ("adapt", ["no adapter", "no gradients"]),
    ("checkpoint", ["no checkpointing"]),
    ("inputs", ["no gradients"]),
]


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.filterwarnings("ignore:You are trying to modify a model with PEFT for a second time")
@pytest.mark.filterwarnings("ignore:Already found a `peft_config` attribute")
@pytest.mark.parametrize(("omitted", "expected"), OMITTED)
def test_peft_steps_in_order(omitted, expected, monkeypatch):
    peft = pytest.importorskip("peft")
    model = already_adapted(peft)
    with torch.no_grad():
        before = model(input_ids=IDS).logits
    # transformers 5 adds an input hook of its own when checkpointing is turned on; older ones do not.
    monkeypatch.setattr(transformers.LlamaForCausalLM, "enable_input_require_grads", lambda self: None)
    steps = tuple(step for step in patches.PEFT_STEPS if step != omitted)
    patch = patches.require_input_grads(model, lora(peft, "q_proj"), {"use_reentrant": True}, steps)
    assert [p for p in problems(patch.model, before, peft) if p in expected] == expected
    if omitted is None:
        assert problems(patch.model, before, peft) == []
        assert "prepared for k-bit training (not quantised)" in patch.changed
        layer = patch.model.get_decoder().layers[0]
        assert layer._gradient_checkpointing_func.keywords == {"use_reentrant": True}


# The adapter moves logits by 0.77; rounding the merged weights to their grid again by 0.096 (nf4) and 0.006 (int8).
SLACK = {4: 0.2, 8: 0.03}


@pytest.fixture(scope="module")
def in_bits(tmp_path_factory):
    """`in_bits(4)`, `in_bits(8)`: a tiny model whose layers bitsandbytes has quantised, the rest bfloat16, and an adapter."""
    peft = pytest.importorskip("peft")
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: pip install 'llm-parity[kbit]'")
    torch.manual_seed(0)
    # The CPU kernel of 4 bits takes rows in blocks of 32.
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=32, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("model")
    transformers.LlamaForCausalLM(config).save_pretrained(folder)

    def load(bits):
        options = {"load_in_8bit": True}
        if bits == 4:
            options = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32}
        model = transformers.LlamaForCausalLM.from_pretrained(
            folder,
            quantization_config=transformers.BitsAndBytesConfig(**options),
            dtype=torch.bfloat16,
            device_map="cpu",
        ).train()
        torch.manual_seed(1)
        return peft.get_peft_model(model, lora(peft, "v_proj"))

    return load


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("omitted", "expected"), OMITTED)
@pytest.mark.parametrize("bits", [4, 8])
def test_peft_steps_on_a_quantised_model(bits, omitted, expected, in_bits, monkeypatch):
    """Really quantised by bitsandbytes. Merging rounds to its grid anew: logits stay within that, not to the last bit."""
    import peft

    model = in_bits(bits)
    linear = model.get_decoder().layers[0].mlp.up_proj
    assert type(linear).__name__ == {4: "Linear4bit", 8: "Linear8bitLt"}[bits]
    with torch.no_grad():
        before = model(input_ids=IDS).logits
        with model.disable_adapter():
            without = model(input_ids=IDS).logits
    monkeypatch.setattr(transformers.LlamaForCausalLM, "enable_input_require_grads", lambda self: None)
    steps = tuple(step for step in patches.PEFT_STEPS if step != omitted)
    patch = patches.require_input_grads(model, lora(peft, "q_proj"), {"use_reentrant": True}, steps)
    found = problems(patch.model, before, peft, slack=SLACK[bits])
    assert [p for p in found if p in expected] == expected
    if omitted is None:
        assert found == []
        assert bool((before - without).abs().max() > 3 * SLACK[bits])
        assert "prepared for k-bit training (quantised)" in patch.changed
        assert type(patch.model.get_decoder().layers[0].mlp.up_proj) is type(linear)


def test_peft_on_a_trainer(monkeypatch):
    peft = pytest.importorskip("peft")
    trainer = types.SimpleNamespace(model=tiny_model(), args=None, optimizer=None, model_wrapped=None)
    patch = patches.require_input_grads(trainer, lora(peft, "q_proj"), {"use_reentrant": False})
    assert trainer.model is patch.model is trainer.model_wrapped
    assert len(trained_layers(trainer.model)) == 6
    trainer.optimizer = object()
    with pytest.raises(ValueError, match="peft_config: the trainer has an optimizer"):
        patches.require_input_grads(trainer, lora(peft, "q_proj"))


@pytest.fixture(scope="module")
def distiller():
    pytest.importorskip("trl")
    module = pytest.importorskip("trl.experimental.server_distillation.server_distillation_trainer")
    return module.ServerDistillationTrainer


def unmasked(self, teacher_result, student_log_probs, completion_tokens, labels):
    """The server loss as trl 1.1.0 to 1.3.0 wired it: required positions are checked, padding goes in as it is."""
    required = labels != -100
    if (required & ~torch.isfinite(teacher_result["actual_logprobs"])).any():
        raise ValueError("Teacher server is missing actual-token logprobs for required positions")
    return self._compute_sparse_top_1_divergence_loss(
        student_log_probs=student_log_probs,
        teacher_top1_token_ids=teacher_result["topk_token_ids"].squeeze(-1),
        teacher_top1_logprobs=teacher_result["topk_logprobs"].squeeze(-1),
        reverse_token_ids=completion_tokens,
        reverse_teacher_logprobs=teacher_result["actual_logprobs"],
        labels=labels,
    )


def ragged_batch():
    torch.manual_seed(0)
    labels = torch.tensor([[3, 4, 5], [6, -100, -100]])
    padding = labels == -100
    actual = torch.full((2, 3), -1.5).masked_fill(padding, -torch.inf)
    top = torch.full((2, 3, 1), -0.4).masked_fill(padding.unsqueeze(-1), -torch.inf)
    teacher = {"actual_logprobs": actual, "topk_logprobs": top, "topk_token_ids": torch.ones(2, 3, 1, dtype=torch.long)}
    return teacher, torch.randn(2, 3, 8, requires_grad=True), labels


def server_gradient(trainer, beta, tail):
    instance = object.__new__(trainer)
    instance.beta, instance.loss_add_tail, instance.reverse_kl_top_1_mode = beta, tail, "sampled"
    teacher, logits, labels = ragged_batch()
    loss = instance._compute_server_sparse_top_1_divergence_loss(
        teacher, logits.log_softmax(-1), labels.clamp(min=0), labels=labels
    )
    return loss, torch.autograd.grad(loss, logits)[0], labels


def test_the_newest_trl_masks_the_padding_itself(distiller):
    patch = patches.mask_teacher_padding()
    assert not patch
    assert "ServerDistillationTrainer masks the padding itself" in patch.reason


@pytest.mark.parametrize("tail", [True, False])
@pytest.mark.parametrize("beta", [0.5, 1.0])
def test_ragged_completions_have_finite_gradients(distiller, monkeypatch, beta, tail):
    want_loss, want, labels = server_gradient(distiller, beta, tail)  # the newest release is right
    monkeypatch.setattr(distiller, "_compute_server_sparse_top_1_divergence_loss", unmasked)
    if beta == 1.0 and tail:
        loss, gradient, _ = server_gradient(distiller, beta, tail)
        assert loss.isfinite()
        assert not gradient.isfinite().all()
    with patches.mask_teacher_padding() as patch:
        assert patch
        assert len(patch) == 1
        with patches.mask_teacher_padding() as again:
            assert "already" in again.reason
        loss, gradient, labels = server_gradient(distiller, beta, tail)
        torch.testing.assert_close(loss, want_loss)
        torch.testing.assert_close(gradient, want)
        assert (gradient[labels == -100] == 0).all()
        teacher, logits, labels = ragged_batch()
        teacher["actual_logprobs"][0, 1] = -torch.inf
        instance = object.__new__(distiller)
        instance.beta, instance.loss_add_tail = beta, tail
        with pytest.raises(ValueError, match="missing actual-token logprobs"):
            instance._compute_server_sparse_top_1_divergence_loss(teacher, logits.log_softmax(-1), labels, labels)
        assert teacher["actual_logprobs"].isinf().sum() == 3  # the caller's tensors are left alone
    assert distiller._compute_server_sparse_top_1_divergence_loss is unmasked


def test_a_loss_that_cannot_be_tried_is_left_alone(distiller, monkeypatch):
    monkeypatch.setattr(distiller, "_compute_server_sparse_top_1_divergence_loss", lambda self: None)
    patch = patches.mask_teacher_padding()
    assert not patch
    assert "ServerDistillationTrainer could not be tried (TypeError" in patch.reason
