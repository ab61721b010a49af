"""`count_positions`: a row that is padded on the left has the positions of its tokens."""

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from parity.fixes.logits import in_shards, modules_of, probe, undisturbed
from parity.fixes.override import Place, overridden, replaced
from parity.fixes.patch import Patch

NAME = "count_positions"
_LEFT = 32
"""Padding of the probe."""


def count_positions(trainer_or_model: Any) -> Patch:
    """A model with learned positions counts them from each row's first token.

    GRPO, RLOO and online DPO (up to trl 1.16.0) pad prompts on the left and give the model `input_ids` and `attention_mask`
    alone. GPT-2 counts from the first padding token then, and the log-probs of a completion, policy's and reference's, are
    those of a shifted sequence. `generate`, which drew the completion, counts from the first token.

    The backbone is given `position_ids`, Σ mask - 1, in each call with a mask (B, T) and neither positions nor
    a cache. Need is decided on a probe, 36 tokens with and without padding, without gradient, in eval mode.
    Nothing is done where padding changes the logits by no more than rounding (rotary embeddings see distances alone), where
    positions do not mend it, where the probe fails, or under ZeRO-3. Accepts a trainer (its model and reference model) or a
    model.
    """
    places: list[Place] = []
    reasons: list[str] = []
    models = _models(trainer_or_model)
    for model in models:
        backbone, kind = model.base_model, type(model).__name__
        if overridden(backbone, "forward", NAME) is None and (why := _fine(model, backbone)) is not None:
            reasons.append(f"{kind}: {why}")
        else:
            places.append((backbone, "forward", _counted, f"{kind} (positions from the first token)"))
    return replaced(trainer_or_model, NAME, places, reasons if models else ["there is no transformers model"])


def _models(trainer_or_model: Any) -> list[Any]:
    """The language models, of a trainer policy and reference, whatever has wrapped them."""
    from transformers import PreTrainedModel

    inside = modules_of(trainer_or_model)
    return [m for m in inside if isinstance(m, PreTrainedModel) and m.get_output_embeddings() is not None]


def _counted(self: nn.Module, original: Any, *args: Any, **kwargs: Any) -> Any:
    mask = kwargs.get("attention_mask")
    free = kwargs.get("position_ids") is None and kwargs.get("past_key_values") is None
    if free and isinstance(mask, Tensor) and mask.dim() == 2:
        kwargs["position_ids"] = _positions(mask)
    return original(*args, **kwargs)


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
