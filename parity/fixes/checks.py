"""What the fixes accept: settings in range, shapes that fit, no value that would become a silent NaN."""

import math
import numbers
from typing import Any

import torch
from torch import Tensor

from parity.fixes import policy

_POSITIVE = (
    "sapo_temperature_pos sapo_temperature_neg delta max_completion_length current_gradient_accumulation_steps "
    "steps_per_generation"
).split()
_FINITE = (
    "beta entropy_coef off_policy_mask_threshold vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg"
).split()
_OPTIONAL = {"delta", "max_completion_length", "steps_per_generation", "off_policy_mask_threshold"}


def _number(name: str, value: Any) -> Any:
    if isinstance(value, numbers.Real) or (isinstance(value, Tensor) and value.numel() == 1):
        return value
    raise ValueError(f"{name}={value!r}: must be a number")


def check_positive(name: str, value: Any, *, optional: bool = False) -> None:
    """ValueError unless `value` is positive and finite, or None where that is allowed."""
    if not (value is None and optional) and not (_number(name, value) > 0 and math.isfinite(value)):
        raise ValueError(f"{name}={value}: must be positive and finite")


def check_tensors(required: dict[str, Any], optional: dict[str, Any]) -> None:
    """ValueError naming the first of these arguments that is no tensor, or neither that nor None."""
    for name, value in (required | optional).items():
        if not isinstance(value, Tensor) and not (value is None and name in optional):
            raise ValueError(f"{name}={value!r}: must be a tensor")


def check_count(name: str, value: Any) -> None:
    """ValueError unless `value` is None or a whole number of at least 1."""
    if value is not None and not (isinstance(value, numbers.Integral) and int(value) >= 1):
        raise ValueError(f"{name}={value!r}: must be a whole number, at least 1")


# Logits up to this, times a factor up to this, stay within float32. Products of 16-bit numbers reach 2**45 at H = 8192.
LARGEST_FACTOR = 2.0**64


def check_transform(temperature: Any, softcap: Any, logit_scale: Any) -> None:
    """ValueError unless every factor of `softcap(logit_scale * z) / temperature` is at most 2**64."""
    check_positive("temperature", temperature)
    check_positive("softcap", softcap, optional=True)
    check_positive("logit_scale", logit_scale)
    factors = [("logit_scale", logit_scale, "temperature", temperature)]
    if softcap is not None:
        factors = [("logit_scale", logit_scale, "softcap", softcap), ("softcap", softcap, "temperature", temperature)]
    for above, value, below, divisor in factors:
        if float(value) / float(divisor) > LARGEST_FACTOR:
            raise ValueError(
                f"{above}={value}, {below}={divisor}: {above} / {below} is beyond 2**64, too much for float32"
            )


@torch._disable_dynamo  # as in logprobs.py
def check_settings(s: Any) -> None:
    """ValueError naming the first setting of the loss `s` that is out of range, or that lacks what it needs."""
    if s.loss_type not in policy.LOSS_TYPES:
        raise ValueError(f"loss_type={s.loss_type!r}: choose one of {', '.join(policy.LOSS_TYPES)}")
    if s.importance_sampling_level not in ("token", "sequence"):
        raise ValueError(f"importance_sampling_level={s.importance_sampling_level!r}: choose 'token' or 'sequence'")
    check_transform(s.temperature, s.softcap, s.logit_scale)
    check_count("chunk_size", s.chunk_size)
    check_count("memory_budget", s.memory_budget)
    for name in _POSITIVE:
        check_positive(name, getattr(s, name), optional=name in _OPTIONAL)
    for name in _FINITE:
        value = getattr(s, name)
        if not (value is None and name in _OPTIONAL) and not math.isfinite(_number(name, value)):
            raise ValueError(f"{name}={value}: must be finite")
    for name in ("epsilon_low", "epsilon_high", "top_entropy_quantile"):
        value = _number(name, getattr(s, name))
        if not 0 <= value <= (1 if name == "top_entropy_quantile" else math.inf):
            raise ValueError(f"{name}={value}: out of range")
    if s.beta != 0.0 and not s.use_ref_model:
        raise ValueError(f"use_ref_model=False with beta={s.beta}: the KL needs a reference; set beta=0.0")
    if s.loss_type == "dr_grpo" and s.max_completion_length is None:
        raise ValueError("max_completion_length=None: loss_type 'dr_grpo' divides by it")


def check_shapes(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    ids: Tensor,
    names: tuple[str, str, str, str] = ("hidden", "weight", "bias", "ids"),
) -> None:
    """ValueError naming what does not fit hidden (..., H), weight (V, H), bias (V,), ids (...), or has a wrong dtype."""
    of_hidden, of_weight, of_bias, of_ids = names
    if weight.dim() != 2 or weight.shape[0] < 1:
        raise ValueError(f"{of_weight} of shape {tuple(weight.shape)}: expected (V, H) with V at least 1")
    if hidden.dim() < 1 or hidden.shape[-1] != weight.shape[1]:
        expected = f"(..., {weight.shape[1]}) to fit {of_weight}"
        raise ValueError(f"{of_hidden} of shape {tuple(hidden.shape)}: expected {expected}")
    if ids.shape != hidden.shape[:-1]:
        expected = f"{tuple(hidden.shape[:-1])} to fit {of_hidden}"
        raise ValueError(f"{of_ids} of shape {tuple(ids.shape)}: expected {expected}")
    if ids.dtype == torch.bool or ids.is_floating_point() or ids.is_complex():
        raise ValueError(f"{of_ids} of dtype {ids.dtype}: expected an integer dtype")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"{of_bias} of shape {tuple(bias.shape)}: expected ({weight.shape[0]},) to fit {of_weight}")
    for name, tensor in ((of_hidden, hidden), (of_weight, weight), (of_bias, bias)):
        if tensor is not None and not tensor.is_floating_point():
            raise ValueError(f"{name} of dtype {tensor.dtype}: expected a floating dtype")


@torch._disable_dynamo
def check_values(
    ids: Tensor,
    vocab: int,
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
    found.append(("selected_token_ids", ids, ((ids < 0) | (ids >= vocab)) & mask))
    found.append(("advantages", advantages, ~advantages.isfinite() & like(advantages, mask, live)))
    if ratio is not None:
        found.append(("vllm_is_ratio", ratio, ~((ratio >= 0) & ratio.isfinite()) & like(ratio, mask, live)))
    for name, tensor in logps.items():
        if tensor is not None:  # NaN stands for a token that the sampler could not score
            bad = tensor.isinf() if name == "sampling_per_token_logps" else ~tensor.isfinite()
            found.append((name, tensor, bad & mask))
    if num_items is not None:
        if not isinstance(num_items, Tensor):
            _number("num_items_in_batch", num_items)
        count = torch.as_tensor(num_items, device=mask.device)
        if count.numel() != 1:
            raise ValueError(f"num_items_in_batch of shape {tuple(count.shape)}: expected one number")
        found.append(("num_items_in_batch", count, ~((count >= 0) & count.isfinite())))
    flags = torch.stack([bad.any() for _, _, bad in found]).tolist()
    for (name, tensor, bad), flag in zip(found, flags, strict=True):
        if flag:
            where = f", outside [0, {vocab})" if tensor is ids else ""
            raise ValueError(f"{name}: contains {tensor[bad].reshape(-1)[0].item()}{where}")


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
