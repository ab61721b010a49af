"""What `FusedLinearGRPOLoss` accepts: settings in range, shapes that fit, no value that would become a silent NaN."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from parity.fixes import policy

_POSITIVE = (
    "sapo_temperature_pos sapo_temperature_neg temperature logit_scale delta softcap chunk_size max_completion_length "
    "current_gradient_accumulation_steps steps_per_generation"
).split()
_FINITE = (
    "beta entropy_coef off_policy_mask_threshold vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg"
).split()


def check_positive(values: Mapping[str, Any]) -> None:
    """ValueError naming the first value that is neither None nor positive and finite."""
    for name, value in values.items():
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise ValueError(f"{name}={value}: must be positive and finite")


@torch._disable_dynamo  # as in logprobs.py
def check_settings(s: Any) -> None:
    """ValueError naming the first setting of the loss `s` that is out of range, or that lacks what it needs."""
    if s.loss_type not in policy.LOSS_TYPES:
        raise ValueError(f"loss_type={s.loss_type!r}: choose one of {', '.join(policy.LOSS_TYPES)}")
    if s.importance_sampling_level not in ("token", "sequence"):
        raise ValueError(f"importance_sampling_level={s.importance_sampling_level!r}: choose 'token' or 'sequence'")
    if s.beta != 0.0 and not s.use_ref_model:
        raise ValueError(f"use_ref_model=False with beta={s.beta}: the KL needs a reference; set beta=0.0")
    if s.loss_type == "dr_grpo" and s.max_completion_length is None:
        raise ValueError("max_completion_length=None: loss_type 'dr_grpo' divides by it")
    check_positive({name: getattr(s, name) for name in _POSITIVE})
    for name in _FINITE:
        value = getattr(s, name)
        if value is not None and not math.isfinite(value):
            raise ValueError(f"{name}={value}: must be finite")
    for name in ("epsilon_low", "epsilon_high", "top_entropy_quantile"):
        value = getattr(s, name)
        if not 0 <= value <= (1 if name == "top_entropy_quantile" else math.inf):
            raise ValueError(f"{name}={value}: out of range")


@torch._disable_dynamo
def check_values(
    attention_mask: Tensor,
    mask: Tensor,
    advantages: Tensor,
    ratio: Tensor | None,
    logps: dict[str, Tensor | None],
    num_items: Tensor | float | None,
) -> None:
    """ValueError naming tensor and value, for every value that would turn into a silent NaN; one device transfer."""
    live = mask.any(1, keepdim=True)
    found = [("attention_mask", attention_mask, (attention_mask != 0) & (attention_mask != 1))]
    found.append(("advantages", advantages, ~advantages.isfinite() & like(advantages, mask, live)))
    if ratio is not None:
        found.append(("vllm_is_ratio", ratio, ~((ratio >= 0) & ratio.isfinite()) & like(ratio, mask, live)))
    for name, tensor in logps.items():
        if tensor is not None:  # NaN stands for a token that the sampler could not score
            bad = tensor.isinf() if name == "sampling_per_token_logps" else ~tensor.isfinite()
            found.append((name, tensor, bad & mask))
    if num_items is not None:
        count = torch.as_tensor(num_items, device=mask.device)
        if count.numel() != 1:
            raise ValueError(f"num_items_in_batch of shape {tuple(count.shape)}: expected one number")
        found.append(("num_items_in_batch", count, ~((count >= 0) & count.isfinite())))
    flags = torch.stack([bad.any() for _, _, bad in found]).tolist()
    for (name, tensor, bad), flag in zip(found, flags, strict=True):
        if flag:
            raise ValueError(f"{name}: contains {tensor[bad].reshape(-1)[0].item()}")


def columns(x: Any, mask: Tensor, name: str) -> Any:
    """`x` as (B, 1) or (B, T); ValueError where it is neither."""
    if x is None:
        return None
    column = x.unsqueeze(1) if x.dim() == 1 else x
    if column.dim() != 2 or column.shape[0] != mask.shape[0] or column.shape[1] not in (1, mask.shape[1]):
        b, t = mask.shape
        raise ValueError(f"{name} of shape {tuple(x.shape)}: expected ({b},), ({b}, 1) or ({b}, {t})")
    return column


def like(x: Tensor, mask: Tensor, live: Tensor) -> Tensor:
    """The mask that goes with `x`: (B, T), or (B, 1) where `x` has one value a sequence."""
    return mask if x.shape == mask.shape else live
