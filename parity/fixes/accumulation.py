"""`divide_by_accumulation`: gradients of a window that are not multiplied by its number of micro-batches."""

import inspect
import re
from typing import Any

from torch import Tensor

from parity.fixes.patch import ORIGINAL, Patch

NAME = "divide_by_accumulation"


def divide_by_accumulation(trainer: Any) -> Patch:
    """A training step that runs its backward pass itself divides the loss by the micro-batches of the window.

    OnlineDPOTrainer (trl 1.16.0 with transformers 5.23.0) overrides `training_step`, hands the mean of a micro-batch to
    `accelerator.backward` and divides only what it returns. Trainer tells accelerate of one accumulation step, so nobody
    divides: gradients are `gradient_accumulation_steps` times those of the window, under a logged loss that is right.

    Wraps `trainer.accelerator.backward`, for this trainer alone. Nothing is done where the trainer's step leaves the
    backward pass to `Trainer` or divides itself (its source is read), or where accelerate divides.
    """
    step = type(trainer).training_step
    if not _undivided(step):
        return Patch(NAME, reason="the trainer's step leaves the division to Trainer, or divides")
    accelerator = trainer.accelerator
    if accelerator.gradient_accumulation_steps != 1:
        return Patch(NAME, reason="accelerate divides by the accumulation steps")
    backward = accelerator.backward
    if hasattr(backward, ORIGINAL):
        return Patch(NAME, reason="already applied")

    def divided(loss: Tensor, **kwargs: Any) -> None:
        planned = trainer.args.gradient_accumulation_steps
        backward(loss / getattr(trainer, "current_gradient_accumulation_steps", planned), **kwargs)

    setattr(divided, ORIGINAL, backward)
    accelerator.backward = divided
    return Patch(NAME, changed=("accelerator.backward",), _undo=[lambda: vars(accelerator).pop("backward", None)])


def _undivided(step: Any) -> bool:
    """Whether a training step calls `accelerator.backward` and divides no loss before it does."""
    try:
        source = inspect.getsource(step)
    except (OSError, TypeError):
        return False
    before, call, _ = source.partition("accelerator.backward(")
    return bool(call) and re.search(r"loss\s*(/=|=\s*loss\s*/)", before) is None
