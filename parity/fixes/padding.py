"""`mask_padded_log_probs`: leave padding out of the KL and entropy that online DPO logs."""

import inspect
import re
from typing import Any

from torch import Tensor

from parity.fixes.override import replaced, source_of
from parity.fixes.patch import Patch

NAME = "mask_padded_log_probs"
_UNMASKED = re.compile(r"^\s*kl = logprobs - ref_logprobs$", re.MULTILINE)
"""In a training step that takes a KL from log-probs as they are."""


def mask_padded_log_probs(trainer: Any) -> Patch:
    """Log-probs of padding are 0 in a trainer that sums them up for what it logs.

    OnlineDPOTrainer (trl 0.13.0 to 1.16.0) logs `objective/kl`, `objective/non_score_reward`, `objective/rlhf_reward` and
    `objective/entropy` as sums over every position of the padded batch: log-probs of pad tokens given a finished
    completion are counted, and a batch of unequal lengths shows a KL of any size and sign. The loss masks them itself and
    stays as it is.

    Wraps `trainer._forward`, for this trainer alone. Nothing is done where the trainer's step sums nothing unmasked (its
    source is read).
    """
    forward = getattr(trainer, "_forward", None)
    if forward is None or "completion_mask" not in inspect.signature(forward).parameters:
        return Patch(NAME, reason="the trainer scores no completions in a method of its own")
    if not _UNMASKED.search(source_of(getattr(type(trainer), "training_step", None))):
        return Patch(NAME, reason="the trainer's step sums no log-probs of padding")
    signature = inspect.signature(forward)

    def masked(self: Any, original: Any, *args: Any, **kwargs: Any) -> Tensor:
        mask = signature.bind(*args, **kwargs).arguments["completion_mask"]
        logps: Tensor = original(*args, **kwargs)
        return logps.masked_fill(mask.to(logps.device) == 0, 0.0)

    return replaced(trainer, NAME, trainer, "trainer", _forward=masked)
