"""Gradients of frozen inputs under reentrant checkpointing."""

import functools
import types

import pytest
import torch
import transformers
from torch.utils.checkpoint import checkpoint

from parity.fixes import patches

IDS = torch.arange(1, 13).reshape(2, 6)


def tiny_model():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=32, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).train()


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
