"""`divide_by_accumulation`: divide online DPO's gradients by the number of micro-batches."""

import re
from typing import Any

from torch import Tensor

from parity.fixes.override import overridden, override, source_of
from parity.fixes.patch import ALREADY, Patch

NAME = "divide_by_accumulation"


def divide_by_accumulation(trainer: Any) -> Patch:
    """A training step that runs its backward pass itself divides the loss by the micro-batches of the window.

    OnlineDPOTrainer (trl 0.24.0 to 1.16.0) overrides `training_step`, hands the mean of a micro-batch to
    `accelerator.backward` and divides only what it returns. Trainer tells accelerate of one accumulation step, so nobody
    divides (but transformers 5.2.0 to 5.5.0): gradients are `gradient_accumulation_steps` times those of the window,
    under a logged loss that is right.

    Wraps `trainer.accelerator.backward`, for this trainer alone. Nothing is done where the trainer's step leaves the
    backward pass to `Trainer` or divides itself (its source is read), or where accelerate divides.
    """
    step = getattr(type(trainer), "training_step", None)
    if step is None:
        return Patch(NAME, reason=f"{type(trainer).__name__} has no training_step")
    if not _undivided(step):
        return Patch(NAME, reason="the trainer's step leaves the division to Trainer, or divides")
    accelerator = getattr(trainer, "accelerator", None)
    if accelerator is None:
        return Patch(NAME, reason=f"{type(trainer).__name__} has no accelerator")
    if accelerator.gradient_accumulation_steps != 1:
        return Patch(NAME, reason="accelerate divides by the accumulation steps")
    change = overridden(accelerator, "backward", NAME)
    if change is not None:
        return Patch(NAME, reason=ALREADY, _undo=change.hold(trainer))

    def divided(self: Any, original: Any, loss: Tensor, **kwargs: Any) -> Any:
        planned = getattr(getattr(trainer, "args", None), "gradient_accumulation_steps", 1)
        return original(loss / getattr(trainer, "current_gradient_accumulation_steps", planned), **kwargs)

    change = override(accelerator, "backward", NAME, divided)
    return Patch(NAME, changed=("accelerator.backward",), _undo=change.hold(trainer))


def _undivided(step: Any) -> bool:
    """Whether a training step calls `accelerator.backward` and divides no loss before it does."""
    before, call, _ = source_of(step).partition("accelerator.backward(")
    return bool(call) and re.search(r"loss\s*(/=|=\s*loss\s*/)", before) is None
