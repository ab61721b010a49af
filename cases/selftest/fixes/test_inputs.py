"""Gradients of frozen inputs under reentrant checkpointing, and the steps of PEFT in their order."""

import contextlib
import functools
import types

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from parity.fixes import patches

transformers = pytest.importorskip("transformers")
IDS = torch.arange(1, 13).reshape(2, 6)


def tiny_model(dtype=torch.float32, vocab=32, hidden=16, intermediate=32):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=32, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).to(dtype).train()


def loss_of(model):
    return model(input_ids=IDS, labels=IDS).loss


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
    assert not any(m.get_input_embeddings()._forward_hooks for m in (calm, nothing))


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


def problems(model, logits_before, peft, slack):
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


# The adapter moves logits by 0.77; rounding the merged weights to their grid again by 0.096 (nf4) and 0.006 (int8).
SLACK = {None: 0.03, 4: 0.2, 8: 0.03}
LINEAR = {None: "Linear", 4: "Linear4bit", 8: "Linear8bitLt"}


@pytest.fixture(scope="module")
def in_bits(tmp_path_factory):
    """`in_bits(4)`, `in_bits(8)`: a tiny model whose layers bitsandbytes has quantised, the rest bfloat16, and an adapter."""
    peft = pytest.importorskip("peft")
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: pip install 'llm-parity[kbit]'")
    folder = tmp_path_factory.mktemp("model")
    tiny_model(vocab=64, hidden=64, intermediate=64).save_pretrained(
        folder
    )  # the CPU kernel of 4 bits takes rows in blocks of 32

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
@pytest.mark.parametrize("bits", SLACK)
def test_peft_steps_in_order(bits, omitted, expected, request, monkeypatch):
    """Quantised by bitsandbytes where it has bits. Merging rounds to its grid anew: logits stay within that."""
    peft = pytest.importorskip("peft")
    model = request.getfixturevalue("in_bits")(bits) if bits else already_adapted(peft)
    linear = model.get_decoder().layers[0].mlp.up_proj
    assert type(linear).__name__ == LINEAR[bits]
    with torch.no_grad():
        before = model(input_ids=IDS).logits
        with model.disable_adapter():
            without = model(input_ids=IDS).logits
    # transformers 5 adds an input hook of its own when checkpointing is turned on; older ones do not.
    monkeypatch.setattr(transformers.LlamaForCausalLM, "enable_input_require_grads", lambda self: None)
    steps = tuple(step for step in patches.PEFT_STEPS if step != omitted)
    patch = patches.require_input_grads(model, lora(peft, "q_proj"), {"use_reentrant": True}, steps)
    found = problems(patch.model, before, peft, slack=SLACK[bits])
    assert [p for p in found if p in expected] == expected
    if omitted is None:
        assert found == []
        assert bool((before - without).abs().max() > 3 * SLACK[bits])
        assert f"prepared for k-bit training ({'quantised' if bits else 'not quantised'})" in patch.changed
        layer = patch.model.get_decoder().layers[0]
        assert bits or layer._gradient_checkpointing_func.keywords == {"use_reentrant": True}
        assert type(layer.mlp.up_proj) is type(linear)


def test_peft_on_a_trainer(monkeypatch):
    peft = pytest.importorskip("peft")
    trainer = types.SimpleNamespace(model=tiny_model(), args=None, optimizer=None, model_wrapped=None)
    patch = patches.require_input_grads(trainer, lora(peft, "q_proj"), {"use_reentrant": False})
    assert trainer.model is patch.model is trainer.model_wrapped
    assert len(trained_layers(trainer.model)) == 6
    trainer.optimizer = object()
    with pytest.raises(ValueError, match="peft_config: the trainer has an optimizer"):
        patches.require_input_grads(trainer, lora(peft, "q_proj"))
