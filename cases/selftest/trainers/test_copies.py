"""Copies of a model that a trainer has had."""

import pytest

from cases.selftest.trainers.asked import planted, right, wrong


def test_the_fix_that_findings_name():
    """`del model.forward` before the copy."""
    assert wrong("sft-trainer", "copies")
    right("sft-trainer", check="copies", restored=True)


def bound_to_the_original(model):
    original = model.forward
    model.forward = lambda *args, **kwargs: original(*args, **kwargs)


def shared_layer(model):
    """A module that no copy copies."""
    norm = model.model.norm
    norm.__class__ = type("Shared", (type(norm),), {"__deepcopy__": lambda self, memo: self})


@pytest.mark.parametrize("holding", [bound_to_the_original, shared_layer])
def test_a_copy_that_holds_on_to_the_original_is_wrong(holding):
    def begun(begin, self, *args, **kwargs):
        begin(self, *args, **kwargs)
        vars(self.model).pop("forward", None)
        holding(self.model)

    with planted("trl.DPOTrainer.__init__", begun):
        assert wrong("dpo-trainer", "copies") == {"logits of the copy behind a step of the original"}
