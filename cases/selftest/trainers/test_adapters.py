"""LoRA and its reference: the released trainers have it right, and a reference that is the policy, or the base, is seen."""

import contextlib
import sys

import pytest
import torch

from cases.selftest.trainers import asked
from parity.trainers import catalogue
from parity.trainers.checks.variations import Adapter
from parity.trainers.rig import stored_window

QUANTITIES = {"sequences", "loss", "finite gradient", "gradient"}


def disagreeing(trainer, **settings):
    found = asked.verdicts(trainer, "adapters", **settings)
    assert found.keys() == QUANTITIES
    return asked.disagreeing(found)


@contextlib.contextmanager
def nothing(model, adapter_name):
    yield


@contextlib.contextmanager
def base(model, adapter_name):
    with model.disable_adapter():
        yield


@pytest.mark.parametrize(("stand_in", "kind"), [(nothing, "new"), (nothing, "saved-head"), (base, "existing")])
@pytest.mark.parametrize("trainer", ["dpo-trainer", "kto-trainer", "grpo-trainer"])
def test_a_reference_that_is_another_model_is_seen(monkeypatch, trainer, stand_in, kind):
    """The adapter stays on, or all of them are off where the first one was asked for."""
    for name in ("dpo", "kto", "grpo"):
        catalogue.load()
        __import__(f"trl.trainer.{name}_trainer")
        monkeypatch.setattr(sys.modules[f"trl.trainer.{name}_trainer"], "use_adapter", stand_in)
    assert "gradient" in disagreeing(trainer, adapter=kind)


def test_policy_and_references_are_three_models():
    adapter = Adapter("existing")
    ids = torch.tensor([[3, 4, 5]])
    with torch.no_grad():
        policy = adapter.policy("llama")(ids).logits
        handed_over = stored_window.reference(adapter.reference("llama"))(ids).logits
        alone = stored_window.reference("llama")(ids).logits
    for one, other in ((policy, handed_over), (policy, alone), (handed_over, alone)):
        assert (one - other).abs().max() > 1e-2


def test_only_the_adapter_is_trained_and_none_of_it_is_zero():
    trained = {n: p for n, p in Adapter("new").policy("llama").named_parameters() if p.requires_grad}
    assert trained
    assert all("lora_" in name and bool((p != 0).all()) for name, p in trained.items())
