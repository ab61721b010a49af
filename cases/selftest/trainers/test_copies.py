"""Copies of a model that a trainer has had."""

import pytest
from trl import DPOTrainer

from parity.registry import run_case, select
from parity.trainers import catalogue


def rows(trainer, restored=False):
    found = (c for c in catalogue.cases(trainer, "nightly", 0) if c.settings["check"] == "copies")
    case = next(c for c in found if c.settings.get("restored", False) == restored)
    return list(run_case(case, select((f"{trainer}.released",), trainer), "cpu", False))


def test_a_trainer_that_leaves_the_forward_alone_is_right():
    assert {row.verdict for row in rows("online-dpo-trainer")} == {"agree"}


def test_the_fix_that_findings_name():
    """`del model.forward` before the copy."""
    assert {row.verdict for row in rows("sft-trainer")} == {"agree", "disagree"}
    assert {row.verdict for row in rows("sft-trainer", restored=True)} == {"agree"}


def bound_to_the_original(model):
    original = model.forward
    model.forward = lambda *args, **kwargs: original(*args, **kwargs)


def shared_layer(model):
    """A module that no copy copies."""
    norm = model.model.norm
    norm.__class__ = type("Shared", (type(norm),), {"__deepcopy__": lambda self, memo: self})


@pytest.mark.parametrize("planted", [bound_to_the_original, shared_layer])
def test_a_copy_that_holds_on_to_the_original_is_wrong(monkeypatch, planted):
    begin = DPOTrainer.__init__

    def init(self, *args, **kwargs):
        begin(self, *args, **kwargs)
        vars(self.model).pop("forward", None)
        planted(self.model)

    monkeypatch.setattr(DPOTrainer, "__init__", init)
    wrong = {row.quantity for row in rows("dpo-trainer") if row.verdict == "disagree"}
    assert wrong == {"logits of the copy behind a step of the original"}
