"""LoRA and its reference: the released trainers have it right, and a reference that is the policy, or the base, is seen."""

import contextlib
import sys

import pytest

from cases.selftest.trainers import asked
from parity.trainers import catalogue

QUANTITIES = {"trained parameters", "sequences", "loss", "gradient"}
KEPT = {"logits, saved and loaded", "logits, merged", "logits, unmerged"}
"""DPO's besides."""


def disagreeing(trainer, **settings):
    found = asked.verdicts(trainer, "adapters", **settings)
    assert found.keys() == QUANTITIES | (KEPT if trainer == "dpo-trainer" else set())
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
