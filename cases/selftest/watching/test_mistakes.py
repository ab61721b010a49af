"""Mistakes of teams that a trial of the watch passed over: each is told, and its right neighbour is silent."""

import pytest
from transformers import TrainerCallback

from cases.selftest.watching.runs import of, watched


def found(watch):
    return [(f.what, f.text.partition(": ")[2]) for f in watch.findings]


class On(TrainerCallback):
    """Calls a function with what a callback gets, behind each step of the optimizer."""

    def __init__(self, do):
        self.do = do

    def on_optimizer_step(self, args, state, control, **given):
        self.do(given)


@pytest.mark.parametrize("times", [0, 1])
@pytest.mark.parametrize("trainer", ["sft-trainer", "cpo-trainer"])
def test_an_optimizer_that_steps_twice(tmp_path, trainer, times):
    made = of(trainer, max_steps=3, per_device_train_batch_size=2, gradient_accumulation_steps=2)
    made.add_callback(On(lambda given: [given["optimizer"].step() for _ in range(times)]))
    watch, _ = watched(made, tmp_path)
    text = "the optimizer steps 2 times on the gradients of one step"
    assert found(watch) == [("update", text)] * times
    assert not made.optimizer.optimizer._optimizer_step_post_hooks


@pytest.mark.parametrize("kept", [False, True])
def test_gradients_that_stay_for_the_next_step(tmp_path, kept):
    made = of("sft-trainer", max_steps=3)
    if kept:
        made.model.zero_grad = lambda **_: None
    watch, _ = watched(made, tmp_path)
    assert [text.partition(": ")[0] for _, text in found(watch)] == [
        "gradients of a step are still there at the next"
    ] * kept
