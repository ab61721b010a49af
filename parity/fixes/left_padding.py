"""`move_padding_right`: a row that is padded on the left is computed as if it began with its first token."""

import contextlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from parity.fixes.language_models import change_each, in_shards, modules_of, probe, undisturbed
from parity.fixes.override import overridden, override
from parity.fixes.patch import Change, Patch

NAME = "move_padding_right"
_LEFT = 33
"""Padding of the probe: no multiple of the block that a model compresses."""
_ROUNDED = 4
"""Units of the dtype, or eight of float32 for rotary positions that are far apart, that the probe's logits may be off by."""
_BY_POSITION = ("input_ids", "inputs_embeds", "attention_mask", "token_type_ids", "mm_token_type_ids")
_PLACED = ("position_ids", "past_key_values", "state", "pixel_values")
"""Arguments by which a caller says itself where tokens stand."""
_IN_COLUMNS = ("use_cache", "output_attentions")
"""What asks for results that are not moved back."""


def move_padding_right(trainer_or_model: Any) -> Patch:
    """Padding before a row's first token has no effect on the row.

    GRPO, RLOO and online DPO (up to trl 1.16.0) pad prompts on the left and give the model `input_ids` and `attention_mask`
    alone. Log-probs of policy and reference depend on the padding then where a model counts learned positions from the
    first column (GPT-2, GPT-BigCode, BioGPT, XGLM), has a state that padding goes into (RecurrentGemma), makes blocks
    from the first column on (DeepSeek-V4), or has virtual tokens before the padding (prompt tuning, P-tuning).

    The backbone is given each row, (B, T), with its tokens (virtual ones of prompt tuning too) from the first column on and
    padding behind them, which no token of a causal model sees; hidden states, (B, T, H), and router logits, (B * T, E), go
    back to the caller's columns. Calls with positions, images, a cache (prefix tuning) or for attention weights are left
    as they are: what `generate` draws is not repaired. Need is decided on a probe, 36 tokens with and without padding,
    without gradient, in eval mode. Nothing is done where padding changes the logits, less their mean, by no more than
    rounding, where moving it does not mend them, where the probe fails, for encoder-decoders, for aLoRA, which counts from a
    row's end, or under ZeRO-3. Accepts a trainer (its model and reference model) or a model.
    """
    return change_each(
        NAME,
        trainer_or_model,
        lambda model: overridden(model.base_model, "forward", NAME),
        lambda model: _fine_in_all(trainer_or_model, model),
        lambda model: (_moved(model.base_model), "padding behind the tokens"),
    )


def _moved(backbone: nn.Module) -> Change:
    """Gives `backbone` a forward that computes the tokens of each row in a row of their own."""
    names = tuple(inspect.signature(backbone.forward).parameters)
    uncached = {"use_cache": False} if "use_cache" in names else {}

    def forward(self: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        kwargs |= dict(zip(names, args, strict=False))
        order = _order(kwargs)
        if order is None:
            return original(**kwargs)
        given = {n: _taken(kwargs[n], order) for n in _BY_POSITION if kwargs.get(n) is not None}
        found, back = original(**kwargs | given | uncached), order.argsort(1)
        found.last_hidden_state = _taken(found.last_hidden_state, back)
        if found.get("hidden_states") is not None:
            found.hidden_states = tuple(_taken(x, back) for x in found.hidden_states)
        if found.get("router_logits") is not None:
            rows = (len(back), -1)
            found.router_logits = tuple(_taken(x.unflatten(0, rows), back).flatten(0, 1) for x in found.router_logits)
        return found

    return override(backbone, "forward", NAME, forward)


def _order(kwargs: dict[str, Any]) -> Tensor | None:
    """The columns of each row, those of tokens first, (B, T); None where they stand so, or the call is not to be moved."""
    mask = kwargs.get("attention_mask")
    told = any(kwargs.get(name) is not None for name in _PLACED) or any(kwargs.get(name) for name in _IN_COLUMNS)
    if told or kwargs.get("return_dict") is False or not isinstance(mask, Tensor) or mask.dim() != 2:
        return None
    padding = (mask == 0).int()
    return padding.argsort(dim=1, stable=True) if bool((padding.diff(dim=1) < 0).any()) else None


def _taken(x: Tensor, order: Tensor) -> Tensor:
    """(B, T, …) with the columns of each row in this order."""
    return x[torch.arange(len(x), device=x.device).unsqueeze(1), order.to(x.device)]


def _fine_in_all(trainer_or_model: Any, model: Any) -> str | None:
    """Why padding need not be moved, neither without the virtual tokens of prompt tuning nor with them, before the padding."""
    outer = (m for m in modules_of(trainer_or_model) if getattr(m, "active_peft_config", None) is not None)
    learning = [m for m in outer if m.active_peft_config.is_prompt_learning and any(x is model for x in m.modules())]
    why = None
    for tried in (model, *learning):
        why = _fine(model, model.base_model, tried)
        if why is None:
            return None
    return why


def _fine(model: Any, backbone: Any, tried: Any) -> str | None:
    """Why padding need not be moved; None where it must be."""
    if backbone is model or model.config.is_encoder_decoder:
        return "it is no decoder with a backbone"
    adapters = getattr(model, "peft_config", {}).values()
    if any(getattr(adapter, "alora_invocation_tokens", None) for adapter in adapters):
        return "aLoRA counts from a row's end"
    if in_shards(model):
        return "ZeRO-3 holds it in shards, and no token can be tried"
    ids, mask = probe(model).values()
    padded = {"input_ids": pad(ids, (_LEFT, 0), value=int(ids[0, 0])), "attention_mask": pad(mask, (_LEFT, 0))}

    def logits(**given: Tensor) -> Tensor:
        return tried(**given, use_cache=False).logits[:, -ids.shape[1] :]

    try:
        with undisturbed(tried), torch.no_grad():
            tried.eval()
            whole, beside = logits(input_ids=ids, attention_mask=mask), logits(**padded)
            with contextlib.ExitStack() as trial:
                for back in _moved(backbone).hold():
                    trial.callback(back)
                moved = logits(**padded)
    except Exception as error:
        return f"it could not be tried ({type(error).__name__}: {error})"
    centre = whole.double().mean(-1, keepdim=True)
    each = [z.norm(dim=-1).median() for z in (whole - centre, *(z.double() - whole for z in (beside, moved)))]
    size, off, mended = map(float, each)  # of the token in the middle: a router may send others elsewhere
    if off <= _ROUNDED * max(torch.finfo(whole.dtype).eps, 8 * torch.finfo(torch.float32).eps) * size:
        return "padding on the left changes nothing"
    return None if mended < off / 2 else "moving the padding does not change what it changes"
