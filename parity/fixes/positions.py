"""`count_positions`: a row that is padded on the left has the positions of its tokens."""

import inspect
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from parity.fixes.logits import in_shards, modules_of, probe, undisturbed
from parity.fixes.patch import ALREADY, Change, Patch

NAME = "count_positions"
_LEFT = 32
"""Padding of the probe."""
_HOOKED: weakref.WeakKeyDictionary[nn.Module, Change] = weakref.WeakKeyDictionary()


def count_positions(trainer_or_model: Any) -> Patch:
    """A model with learned positions counts them from each row's first token.

    GRPO, RLOO and online DPO (up to trl 1.16.0) pad prompts on the left and give the model `input_ids` and `attention_mask`
    alone. GPT-2 counts from the first padding token then, and the log-probs of a completion, policy's and reference's, are
    those of a shifted sequence. `generate`, which drew the completion, counts from the first token.

    A hook before the backbone gives it `position_ids`, Σ mask - 1, in each call with a mask (B, T) and neither positions nor
    a cache. Need is decided on a probe, 36 tokens with and without padding, without gradient, in eval mode.
    Nothing is done where padding changes the logits by no more than rounding (rotary embeddings see distances alone), where
    positions do not mend it, where the probe fails, or under ZeRO-3. Accepts a trainer (its model and reference model) or a
    model.
    """
    changed: list[str] = []
    reasons: list[str] = []
    undo: list[Callable[[], object]] = []
    for model in _models(trainer_or_model):
        backbone, kind = model.base_model, type(model).__name__
        change = _HOOKED.get(backbone)
        if change is not None and change.active:
            reasons.append(ALREADY)
        elif (why := _fine(model, backbone)) is not None:
            reasons.append(f"{kind}: {why}")
            continue
        else:
            change = _HOOKED[backbone] = Change(backbone.register_forward_pre_hook(_counted, with_kwargs=True).remove)
            changed.append(f"{kind} (positions from the first token)")
        undo += change.hold(trainer_or_model)
    reason = None if changed else "; ".join(dict.fromkeys(reasons)) or "there is no transformers model"
    return Patch(NAME, tuple(changed), reason=reason, _undo=undo)


def _models(trainer_or_model: Any) -> list[Any]:
    """The language models, of a trainer policy and reference, whatever has wrapped them."""
    from transformers import PreTrainedModel

    inside = modules_of(trainer_or_model)
    return [m for m in inside if isinstance(m, PreTrainedModel) and m.get_output_embeddings() is not None]


def _counted(backbone: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    mask = kwargs.get("attention_mask")
    free = kwargs.get("position_ids") is None and kwargs.get("past_key_values") is None
    if free and isinstance(mask, Tensor) and mask.dim() == 2:
        kwargs = kwargs | {"position_ids": _positions(mask)}
    return args, kwargs


def _positions(mask: Tensor) -> Tensor:
    return (mask.long().cumsum(-1) - 1).clamp(min=0)


def _fine(model: Any, backbone: Any) -> str | None:
    """Why positions need not be given; None where they must be."""
    if "position_ids" not in inspect.signature(backbone.forward).parameters:
        return "it takes no positions"
    if in_shards(model):
        return "ZeRO-3 holds it in shards, and no token can be tried"
    ids, mask = probe(model).values()
    seen = pad(mask, (_LEFT, 0))
    padded = {"input_ids": pad(ids, (_LEFT, 0), value=int(ids[0, 0])), "attention_mask": seen}
    calls = {"input_ids": ids, "attention_mask": mask}, padded, padded | {"position_ids": _positions(seen)}
    try:
        with undisturbed(model), torch.no_grad():
            model.eval()
            whole, shifted, counted = (model(**g, use_cache=False).logits[:, -ids.shape[1] :] for g in calls)
    except Exception as error:
        return f"it could not be tried ({type(error).__name__}: {error})"
    size, off, mended = (float(z.double().norm()) for z in (whole, shifted - whole, counted - whole))
    if off <= 16 * torch.finfo(whole.dtype).eps * size:
        return "padding on the left changes nothing"
    return None if mended < off / 2 else "padding on the left changes more than positions"
