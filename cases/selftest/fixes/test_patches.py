"""The runtime patches on real libraries: what upstream does first (so that each test can fail), then what we do."""

import contextlib
import importlib
import logging
import sys

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


def nested(softcap=30.0):
    return transformers.Gemma3Config(text_config={"final_logit_softcapping": softcap, "num_hidden_layers": 1})


@pytest.mark.parametrize("value", [None, 0.0, 50.0])
def test_lifting_never_overwrites(value):
    config = nested()
    config.final_logit_softcapping = value
    assert not patches.lift_text_config_attributes(config)
    assert config.final_logit_softcapping == value


def test_nothing_to_lift():
    patch = patches.lift_text_config_attributes(nested(None))
    assert not patch and "only in the nested text config" in patch.reason
    config = nested()
    config.text_config.my_scale = 0.25
    assert patches.lift_text_config_attributes(config, names=("my_scale",))
    assert config.my_scale == 0.25
