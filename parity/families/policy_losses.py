"""Formulas of family `policy`, from log-probs and entropies to the loss. torch alone."""

import math
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
WINDOW_NORMALISED = ("dapo", "cispo", "vespo")
"""Losses whose ratio is clipped on both sides; losses that are divided by the tokens of the optimizer step."""
CONFIG_FIELDS = tuple(
    (
        "loss_type importance_sampling_level epsilon epsilon_high delta beta use_bias_correction_kl temperature "
        "off_policy_mask_threshold entropy_coef sapo_temperature_pos sapo_temperature_neg vespo_k_pos vespo_lambda_pos "
        "vespo_k_neg vespo_lambda_neg max_completion_length"
    ).split()
)
"""Settings that a field of the same name decides in the configuration of TRL's trainer."""
OF_LOSS = (*(n for n in CONFIG_FIELDS if n not in ("epsilon", "epsilon_high", "beta")), "steps_per_generation")
"""Settings that TRL's config and a fused loss have under these names."""

GIVEN = {
    "completion_ids": "ids",
    "completion_mask": "completion_mask",
    "tool_mask": "tool_mask",
    "advantages": "advantages",
    "old_per_token_logps": "old_logps",
    "ref_per_token_logps": "ref_logps",
    "sampling_per_token_logps": "sampling_logps",
    "importance_sampling_ratio": "importance_sampling_ratio",
    "num_items_in_batch": "num_items_in_batch",
}
"""What TRL's `GRPOTrainer.compute_loss` is given -> the family's name of it."""


def divergence(log_r: Tensor, w: Tensor | None) -> Tensor:
    """k3 of each token, exp(log r) - log r - 1 with log r = lp_ref - lp; times w where its bias is corrected."""
    kl = log_r.exp() - log_r - 1
    return kl if w is None else kl * w


def losses(s: SimpleNamespace, x: Any, lp: Tensor, entropy: Tensor, measure: Any = divergence) -> dict[str, Tensor]:
    """The loss of one micro-batch, (…), of its log-probs and entropies (…, B, T), with metrics; `_terms` is (…, B, T).

    `s`: the settings of `CONFIG_FIELDS`, `accumulation`, `steps_per_generation` and `mode`. `x`: an object with the family's
    tensors mask, advantages, old_logps, ref_logps, sampling_logps, importance_sampling_ratio, top_entropy_quantile and
    num_items_in_batch, None where absent. `measure` is the KL of a token.
    """
    mask = x.mask.to(torch.float64)
    advantages = x.advantages if x.advantages.dim() == 2 else x.advantages.unsqueeze(-1)
    # a masked token has no part in anything: excluded before its ratio could overflow in a recipe's rounding
    d = torch.where(x.mask.bool(), lp - (lp.detach() if x.old_logps is None else x.old_logps), 0.0)
    log_w = d if s.importance_sampling_level == "token" else mean(d, mask)
    w = log_w.exp()

    keep = mask
    l = surrogate(s, lp, d, w, advantages, mask, x.importance_sampling_ratio)
    if s.off_policy_mask_threshold is not None:
        sampling = x.sampling_logps if x.sampling_logps is not None else x.old_logps
        l = l * off_policy_mask(s, lp, advantages, sampling, mask)
    if x.top_entropy_quantile is not None:
        keep = mask * entropy_mask(entropy, mask, 1 - float(x.top_entropy_quantile))
        l = l * (keep + (1 - mask))  # the mask itself is applied once, by `aggregate`
    if x.importance_sampling_ratio is not None and s.loss_type != "vespo":
        l = l * x.importance_sampling_ratio
    kl = None
    if s.beta != 0.0:
        kl = measure(torch.where(x.mask.bool(), x.ref_logps - lp, 0.0), w if s.use_bias_correction_kl else None)
        l = l + s.beta * kl
    l = l.expand(lp.shape)
    loss, terms = aggregate(s, l, mask, float(x.num_items_in_batch))
    if s.entropy_coef != 0.0:
        accumulation = s.accumulation if s.mode == "train" else 1
        share = keep / keep.sum((-2, -1), keepdim=True).clamp(min=1) / accumulation
        terms = terms - s.entropy_coef * entropy * share
        loss = loss - s.entropy_coef * (entropy * share).sum((-2, -1))
    return {"loss": loss, "_logps": lp, "_terms": terms} | metrics(s, w, advantages, mask, kl, entropy)


def mean(values: Tensor, mask: Tensor) -> Tensor:
    """Σ_t m·v / max(Σ_t m, 1) of each sequence, (…, B, 1)."""
    return (values * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)


def surrogate(
    s: SimpleNamespace, lp: Tensor, d: Tensor, w: Tensor, advantages: Tensor, mask: Tensor, ratio: Tensor | None
) -> Tensor:
    """The policy term of each token, (…, B, T) or (…, B, 1), before masks, sampler ratio and KL."""
    if s.loss_type in CLIPPED:
        capped = w if s.delta is None else w.clamp(max=s.delta)
        clipped = w.clamp(1 - s.epsilon, 1 + epsilon_high(s))
        return -torch.minimum(capped * advantages, clipped * advantages)
    if s.loss_type == "cispo":
        return -w.clamp(max=epsilon_high(s)).detach() * advantages * lp
    if s.loss_type == "sapo":
        tau = _by_sign(advantages > 0, s.sapo_temperature_pos, s.sapo_temperature_neg)
        return -torch.sigmoid(tau * (w - 1)) * 4 / tau * advantages
    return -vespo_phi(s, d.detach(), advantages, mask, ratio) * advantages * lp


def _by_sign(condition: Tensor, yes: float, no: float) -> Tensor:
    """`torch.where` of two numbers, which would otherwise be rounded to float32."""
    return torch.where(condition, yes, torch.tensor(no, dtype=torch.float64))


def cap_below_clip(s: SimpleNamespace) -> bool:
    """Whether δ caps ratios that the clip leaves alone."""
    return s.delta is not None and bool(s.delta <= 1 + epsilon_high(s))


def epsilon_high(s: Any) -> float:
    """Upper clip ε, or for cispo the bound itself."""
    return s.epsilon if s.epsilon_high is None else s.epsilon_high


def vespo_phi(s: SimpleNamespace, d: Tensor, advantages: Tensor, mask: Tensor, ratio: Tensor | None) -> Tensor:
    """φ = exp(λ + k·log W - λ·W), (…, B, 1), with log W the clamped sum of log-ratios and log sampler ratios."""
    low, high = math.log(1e-8), 20.0
    log_w = (d.clamp(-20.0, 20.0) * mask).sum(-1, keepdim=True)
    if ratio is not None:
        log_w = log_w + ratio.log().clamp(low, high).sum(-1, keepdim=True)
    log_w = log_w.clamp(low, high)
    k = _by_sign(advantages >= 0, s.vespo_k_pos, s.vespo_k_neg)
    lam = _by_sign(advantages >= 0, s.vespo_lambda_pos, s.vespo_lambda_neg)
    return torch.exp(lam + k * log_w - lam * log_w.exp())


def off_policy_mask(
    s: SimpleNamespace, lp: Tensor, advantages: Tensor, sampling: Tensor | None, mask: Tensor
) -> Tensor:
    """1 where A ≥ 0 or the sequence mean of (lp_samp - lp) ≤ threshold; tokens the sampler could not score count 0."""
    if sampling is None:  # a drift of 0, which nothing rounds
        return ((advantages >= 0) | (s.off_policy_mask_threshold >= 0)).to(lp.dtype)
    gap = (sampling - lp.detach()).nan_to_num(nan=0.0)
    near = mean(gap, mask) <= s.off_policy_mask_threshold
    return ((advantages >= 0) | near).to(lp.dtype)


def entropy_mask(entropy: Tensor, mask: Tensor, quantile: float) -> Tensor:
    """1 where the entropy reaches the quantile (linear interpolation) of the entropies of all loss tokens."""
    values = entropy.detach().flatten(-2)[..., mask.flatten().bool()]
    if values.shape[-1] == 0:
        return torch.zeros_like(mask)
    place = quantile * (values.shape[-1] - 1)
    k = min(int(place), values.shape[-1] - 1)
    ordered = values.sort(-1).values
    threshold = ordered[..., k]
    if place > k:  # a place is no rounded number: where it is whole, the threshold is one of the entropies
        threshold = threshold + (place - k) * (ordered[..., k + 1] - threshold)
    return (entropy.detach() >= threshold[..., None, None]).to(mask.dtype)


def aggregate(s: SimpleNamespace, l: Tensor, mask: Tensor, num_items: float) -> tuple[Tensor, Tensor]:
    """The loss of the micro-batch and the weighted per-token terms it sums.

    grpo, sapo: mean_i Σ_t m·l/max(|o_i|, 1) · bnpo: Σ m·l/max(Σ m, 1) · dr_grpo: Σ m·l/(B·L) · luspo: mean_i Σ_t m·l ·
    dapo, cispo, vespo: Σ m·l/N. In training all but the last group are divided by the accumulation steps, and N is the
    window's share of the generation batch's tokens; in evaluation there is one micro-batch.
    """
    count, tokens = l.shape[-2], mask.sum(-1, keepdim=True)
    training = s.mode == "train"
    accumulation = s.accumulation if training else 1
    if s.loss_type in ("grpo", "sapo"):
        weight = mask / tokens.clamp(min=1) / count / accumulation
    elif s.loss_type == "bnpo":
        weight = mask / mask.sum().clamp(min=1) / accumulation
    elif s.loss_type == "dr_grpo":
        weight = mask / (count * s.max_completion_length) / accumulation
    elif s.loss_type == "luspo":
        weight = mask / count / accumulation
    else:
        window = s.accumulation / s.steps_per_generation if training else 1.0
        weight = mask / (max(num_items, 1.0) * window)
    terms = l * weight
    return terms.sum((-2, -1)), terms


def metrics(
    s: SimpleNamespace, w: Tensor, advantages: Tensor, mask: Tensor, kl: Tensor | None, entropy: Tensor
) -> dict[str, Tensor]:
    """Means over loss tokens; clip fractions at sequence level: one value a sequence."""

    def of_tokens(values: Tensor, per_sequence: bool = False) -> Tensor:
        if per_sequence and values.shape[-1] == 1:
            return values.to(torch.float64).mean((-2, -1))
        return (values * mask).sum((-2, -1)) / mask.sum().clamp(min=1)

    sequence = s.importance_sampling_level == "sequence"
    out = {"entropy": of_tokens(entropy.detach())}
    if kl is not None:
        out["kl"] = of_tokens(kl.detach())
    high = w > 1 + epsilon_high(s)
    if s.loss_type in CLIPPED and not cap_below_clip(s):  # else a share has two readings: with the cap or without
        low_clip, high_clip = (w < 1 - s.epsilon) & (advantages < 0), high & (advantages > 0)
        out["clip_low"], out["clip_high"] = of_tokens(low_clip, sequence), of_tokens(high_clip, sequence)
        out["clip_ratio"] = of_tokens(low_clip | high_clip, sequence)
    elif s.loss_type == "cispo":
        out["clip_ratio"] = of_tokens((w > epsilon_high(s)) & (advantages > 0), sequence)
    return out
