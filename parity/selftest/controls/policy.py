"""Controls of family `policy`: correct float32 losses from the papers and TRL's documentation, in two orders of operations."""

from __future__ import annotations

import math
from types import SimpleNamespace

import torch

from parity.case.inputs import Inputs
from parity.implementations.implementation import Outputs
from parity.selftest.controls.logprobs import Head


def policy(x: Inputs, head: Head, reordered: bool) -> Outputs:
    """Loss and metrics of one micro-batch; `reordered` weighs first and writes every formula the other way."""
    s = x.settings
    logps, entropy = (value.float() for value in head.call(x))
    mask = x.mask.float()
    lengths = mask.sum(1, keepdim=True).clamp(min=1.0)
    advantages = x.advantages if x.advantages.dim() == 2 else x.advantages[:, None]
    counts = x.mask.bool()
    log_ratio = (logps - (logps.detach() if x.old_logps is None else x.old_logps)).masked_fill(~counts, 0.0)
    if s.importance_sampling_level == "sequence":
        scaled = (
            (log_ratio * (mask / lengths)).sum(1, keepdim=True)
            if reordered
            else (log_ratio * mask).sum(1, keepdim=True) / lengths
        )
        weight = scaled.exp()
    else:
        weight = log_ratio.exp()
    token = _surrogate(x, logps, log_ratio, weight, advantages, mask, reordered)
    factor = torch.ones_like(mask)
    keep = mask
    if s.off_policy_mask_threshold is not None:
        factor = factor * _on_policy(x, logps, advantages, mask, lengths)
    if x.top_entropy_quantile is not None and bool(mask.any()):
        chosen = entropy.detach()[mask.bool()]
        keep = mask * (entropy.detach() >= torch.quantile(chosen, 1 - float(x.top_entropy_quantile)))
        factor = factor * keep
    if x.importance_sampling_ratio is not None and s.loss_type != "vespo":
        factor = factor * x.importance_sampling_ratio
    token = (factor * token).expand(logps.shape)
    kl = None
    if s.beta != 0.0:
        log_r = (x.ref_logps - logps).masked_fill(~counts, 0.0)
        kl = torch.expm1(log_r) - log_r if reordered else log_r.exp() - log_r - 1
        kl = kl * weight if s.use_bias_correction_kl else kl
        token = token + s.beta * kl
    training = s.mode == "train"
    loss = _aggregate(s, token, mask, lengths, float(x.num_items_in_batch), reordered)
    if s.entropy_coef != 0.0:
        mean = (entropy * keep).sum() / keep.sum().clamp(min=1.0)
        loss = loss - s.entropy_coef * mean / (s.accumulation if training else 1)
    return {"loss": loss} | _metrics(s, weight.detach(), advantages, mask, kl, entropy.detach())


def _surrogate(
    x: Inputs,
    logps: torch.Tensor,
    log_ratio: torch.Tensor,
    weight: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    reordered: bool,
) -> torch.Tensor:
    s = x.settings
    high = s.epsilon if s.epsilon_high is None else s.epsilon_high
    if s.loss_type == "cispo":
        return -(weight.clamp(max=high).detach() * advantages) * logps
    if s.loss_type == "sapo":
        tau = torch.where(advantages > 0, s.sapo_temperature_pos, s.sapo_temperature_neg)
        gate = 1 / (1 + (-tau * (weight - 1)).exp()) if reordered else (tau * (weight - 1)).sigmoid()
        return -advantages * (gate * (4 / tau)) if reordered else -gate * 4 / tau * advantages
    if s.loss_type == "vespo":
        floor = math.log(1e-8)
        with torch.no_grad():
            total = (log_ratio.clamp(-20, 20) * mask).sum(1, keepdim=True)
            if x.importance_sampling_ratio is not None:
                total = total + x.importance_sampling_ratio.log().clamp(floor, 20).sum(1, keepdim=True)
            total = total.clamp(floor, 20)
            k = torch.where(advantages >= 0, s.vespo_k_pos, s.vespo_k_neg)
            lam = torch.where(advantages >= 0, s.vespo_lambda_pos, s.vespo_lambda_neg)
            phi = (
                (lam * (1 - total.exp()) + k * total).exp()
                if reordered
                else (lam + k * total - lam * total.exp()).exp()
            )
        return -(phi * advantages) * logps
    capped = weight if s.delta is None else weight.clamp(max=s.delta)
    clipped = weight.clamp(1 - s.epsilon, 1 + high)
    if reordered:
        return torch.maximum(-advantages * capped, -advantages * clipped)
    return -torch.minimum(capped * advantages, clipped * advantages)


def _on_policy(
    x: Inputs, logps: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor, lengths: torch.Tensor
) -> torch.Tensor:
    sampled = x.old_logps if x.sampling_logps is None else x.sampling_logps
    gap = torch.zeros_like(logps) if sampled is None else torch.nan_to_num(sampled - logps.detach(), nan=0.0)
    drift = (gap * mask).sum(1, keepdim=True) / lengths
    return ((advantages >= 0) | (drift <= x.settings.off_policy_mask_threshold)).float()


def _aggregate(
    s: SimpleNamespace, token: torch.Tensor, mask: torch.Tensor, lengths: torch.Tensor, items: float, reordered: bool
) -> torch.Tensor:
    training, rows = s.mode == "train", len(mask)
    steps = s.accumulation if training else 1
    if s.loss_type in ("grpo", "sapo"):
        if reordered:
            return (token * (mask / (lengths * rows * steps))).sum()
        return ((token * mask).sum(1, keepdim=True) / lengths).mean() / steps
    divisor = {
        "bnpo": mask.sum().clamp(min=1.0) * steps,
        "dr_grpo": rows * s.max_completion_length * steps,
        "luspo": rows * steps,
    }.get(s.loss_type, max(items, 1.0) * (s.accumulation / s.steps_per_generation if training else 1))
    if reordered:
        return torch.where(mask > 0, token, 0.0).sum(0).sum() * (1 / divisor)
    return (token * mask).sum() / divisor


def _metrics(
    s: SimpleNamespace,
    weight: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    kl: torch.Tensor | None,
    entropy: torch.Tensor,
) -> Outputs:
    def mean(values: torch.Tensor, per_sequence: bool = False) -> torch.Tensor:
        if per_sequence and values.shape[1] == 1:
            return values.float().mean()
        return (values * mask).sum() / mask.sum().clamp(min=1.0)

    sequence = s.importance_sampling_level == "sequence"

    out = {"entropy": mean(entropy)}
    if kl is not None:
        out["kl"] = mean(kl.detach())
    high = s.epsilon if s.epsilon_high is None else s.epsilon_high
    if s.loss_type == "cispo":
        out["clip_ratio"] = mean((weight > high) & (advantages > 0), sequence)
    elif s.loss_type not in ("sapo", "vespo"):
        low_clipped, high_clipped = (weight < 1 - s.epsilon) & (advantages < 0), (weight > 1 + high) & (advantages > 0)
        out |= {
            "clip_low": mean(low_clipped, sequence),
            "clip_high": mean(high_clipped, sequence),
            "clip_ratio": mean(low_clipped | high_clipped, sequence),
        }
    return out
