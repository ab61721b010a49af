"""`move_padding_right`: a row that is padded on the left is computed as if it began with its first token."""

import contextlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from parity.fixes.logits import in_shards, modules_of, probe, undisturbed
from parity.fixes.override import overridden, override
from parity.fixes.patch import ALREADY, Change, Patch

NAME = "move_padding_right"
_LEFT = 33
"""Padding of the probe: no multiple of the block that a model compresses."""
_BY_POSITION = ("input_ids", "inputs_embeds", "attention_mask", "token_type_ids")
_PLACED = ("position_ids", "past_key_values", "state", "pixel_values")
"""Arguments by which a caller says itself where tokens stand."""


def move_padding_right(trainer_or_model: Any) -> Patch:
    """Padding before a row's first token has no effect on the row.

    GRPO, RLOO and online DPO (up to trl 1.16.0) pad prompts on the left and give the model `input_ids` and `attention_mask`
    alone. Log-probs of policy and reference depend on the padding then where a model counts learned positions from the
    first column (GPT-2, GPT-BigCode, BioGPT, XGLM), has a state that padding goes into (RecurrentGemma), or makes
    blocks from the first column on (DeepSeek-V4).

    The backbone is given each row, (B, T), with its tokens from the first column on and padding behind them, which no
    token of a causal model sees; hidden states, (B, T, H), and router logits, (B * T, E), go back to the caller's columns.
    Calls with positions, a cache or images are left as they are: what `generate` draws is not repaired. Need is decided
    on a probe, 36 tokens with and without padding, without gradient, in eval mode. Nothing is done where padding changes
    the logits by no more than rounding, where moving it does not mend them, where the probe fails, or under ZeRO-3.
    Accepts a trainer (its model and reference model) or a model.
    """
    changed: list[str] = []
    reasons: list[str] = []
    undo: list[Callable[[], object]] = []
    for model in _models(trainer_or_model):
        backbone, kind = model.base_model, type(model).__name__
        change = overridden(backbone, "forward", NAME)
        if change is not None:
            reasons.append(ALREADY)
        elif (why := _fine(model, backbone)) is not None:
            reasons.append(f"{kind}: {why}")
            continue
        else:
            change = _moved(backbone)
            changed.append(f"{kind} (padding behind the tokens)")
        undo += change.hold(trainer_or_model)
    reason = None if changed else "; ".join(dict.fromkeys(reasons)) or "there is no transformers model"
    return Patch(NAME, tuple(changed), reason=reason, _undo=undo)


def _models(trainer_or_model: Any) -> list[Any]:
    """The language models, of a trainer policy and reference, whatever has wrapped them."""
    from transformers import PreTrainedModel

    inside = modules_of(trainer_or_model)
    return [m for m in inside if isinstance(m, PreTrainedModel) and m.get_output_embeddings() is not None]


def _moved(backbone: nn.Module) -> Change:
    """Gives `backbone` a forward that computes rows that are padded on the left from their first token."""

    names = tuple(inspect.signature(backbone.forward).parameters)

    def forward(self: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        kwargs |= dict(zip(names, args, strict=False))
        left = _left(kwargs)
        if left is None:
            return original(**kwargs)
        found = original(**kwargs | {n: _rolled(kwargs[n], left) for n in _BY_POSITION if kwargs.get(n) is not None})
        found.last_hidden_state = _rolled(found.last_hidden_state, -left)
        if found.get("hidden_states") is not None:
            found.hidden_states = tuple(_rolled(x, -left) for x in found.hidden_states)
        if found.get("router_logits") is not None:
            rows = (len(left), -1)
            found.router_logits = tuple(_rolled(x.unflatten(0, rows), -left).flatten(0, 1) for x in found.router_logits)
        return found

    return override(backbone, "forward", NAME, forward)


def _left(kwargs: dict[str, Any]) -> Tensor | None:
    """The padding before each row's first token, (B,); None where there is none, or the call is not to be moved."""
    mask = kwargs.get("attention_mask")
    told = kwargs.get("return_dict") is False or any(kwargs.get(name) is not None for name in _PLACED)
    if told or not isinstance(mask, Tensor) or mask.dim() != 2:
        return None
    left = (mask != 0).int().argmax(1)
    return left if bool(left.any()) else None


def _rolled(x: Tensor, left: Tensor) -> Tensor:
    """Row b of (B, T, …) moved to the left by `left[b]`; what leaves it there enters at its end."""
    columns = torch.arange(x.shape[1], device=x.device) + left.to(x.device).unsqueeze(1)
    return x[torch.arange(x.shape[0], device=x.device).unsqueeze(1), columns % x.shape[1]]


def _fine(model: Any, backbone: Any) -> str | None:
    """Why padding need not be moved; None where it must be."""
    if backbone is model:
        return "it has no backbone"
    if in_shards(model):
        return "ZeRO-3 holds it in shards, and no token can be tried"
    ids, mask = probe(model).values()
    padded = {"input_ids": pad(ids, (_LEFT, 0), value=int(ids[0, 0])), "attention_mask": pad(mask, (_LEFT, 0))}

    def logits(**given: Tensor) -> Tensor:
        return model(**given, use_cache=False).logits[:, -ids.shape[1] :]

    try:
        with undisturbed(model), torch.no_grad():
            model.eval()
            whole, beside = logits(input_ids=ids, attention_mask=mask), logits(**padded)
            with contextlib.ExitStack() as trial:
                for back in _moved(backbone).hold():
                    trial.callback(back)
                moved = logits(**padded)
    except Exception as error:
        return f"it could not be tried ({type(error).__name__}: {error})"
    size, off, mended = (float(z.double().norm()) for z in (whole, beside - whole, moved - whole))
    if off <= 16 * torch.finfo(whole.dtype).eps * size:
        return "padding on the left changes nothing"
    return None if mended < off / 2 else "padding on the right changes it too"
