"""Runtime patches for training libraries, each a function and a context manager.

    patch = keep_gradient_checkpointing()          # from here on; patch.undo() takes it back
    with keep_gradient_checkpointing(): ...        # for this block only

Every call returns a `Patch`: true where something was changed, with `changed` naming what, else with the `reason` why
there was nothing to do. Need is decided by looking at the code or its behaviour, never by a version number alone.
A patch of a trainer or a model is bound to it. What several calls ask for stays until each of them is undone, what is
undone is exactly what was done, and each outcome is logged once.
"""

from parity.fixes.accumulation import average_over_window, divide_by_accumulation
from parity.fixes.checkpointing import keep_gradient_checkpointing
from parity.fixes.inputs import require_input_grads
from parity.fixes.left_padding import move_padding_right
from parity.fixes.logits import use_model_logits
from parity.fixes.merging import merge_into_copies
from parity.fixes.padding import mask_padded_log_probs
from parity.fixes.patch import Patch
from parity.fixes.preference import exchange_alpha
from parity.fixes.scale import scale_logits

__all__ = [
    "Patch",
    "average_over_window",
    "divide_by_accumulation",
    "exchange_alpha",
    "keep_gradient_checkpointing",
    "mask_padded_log_probs",
    "merge_into_copies",
    "move_padding_right",
    "require_input_grads",
    "scale_logits",
    "use_model_logits",
]
