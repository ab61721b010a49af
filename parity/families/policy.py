"""Family `policy`: the GRPO losses, from hidden states x LM head to one scalar.

Definitions: grpo (arXiv 2402.03300), bnpo, dr_grpo (2503.20783), dapo (2503.14476), cispo (2506.13585), sapo
(2511.20347), luspo (2602.05261), vespo (2602.10693), sequence-level ratios (GSPO, 2507.18071), delta (INTELLECT-2,
2505.07291), bias-corrected KL and off-policy sequence mask (DeepSeek-V3.2, 2512.02556), entropy mask (2506.01939); where
no paper fixes a combination, the documentation of TRL 1.16. Settings: `policy_settings`; inputs: `policy_inputs`.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch

from parity.case.case import Case
from parity.case.family import Family, Relation
from parity.case.inputs import Inputs
from parity.case.layouts import like
from parity.families import head, policy_stored
from parity.families import policy_inputs as inputs_of
from parity.families import policy_settings as settings_of
from parity.families.policy_settings import CLIPPED, WINDOW_NORMALISED
from parity.judge.stages import log_softmax_again

KL_CAP, KL_LOG_RATIO_CAP = 10.0, 20.0
"""Of the variant "capped KL", nats a token: the KL term and |lp_ref - lp|."""


def oracle(x: Inputs) -> dict[str, torch.Tensor]:
    """The loss of one micro-batch, (…), and its metrics; `_logps` and `_terms` are (…, B, T)."""
    return _losses(x, divergence)


def _losses(x: Inputs, measure: Any) -> dict[str, torch.Tensor]:
    s = x.settings
    z = head.logits(x)
    all_logps = head.log_softmax(x, z)
    lp = head.selected(x, all_logps)
    entropy = head.entropy(x, z, all_logps if s.entropy_coef == 0.0 else log_softmax_again(z, all_logps))
    mask = x.mask.to(torch.float64)
    advantages = x.advantages if x.advantages.dim() == 2 else x.advantages.unsqueeze(-1)
    # a masked token has no part in anything: excluded before its ratio could overflow in a recipe's rounding
    d = torch.where(x.mask.bool(), lp - (lp.detach() if x.old_logps is None else x.old_logps), 0.0)
    log_w = d if s.importance_sampling_level == "token" else _mean(d, mask, keepdim=True)
    w = log_w.exp()

    keep = mask
    l = surrogate(s, lp, d, w, advantages, mask, x.importance_sampling_ratio)
    if s.off_policy_mask_threshold is not None:
        l = l * off_policy_mask(
            s, lp, advantages, x.sampling_logps if x.sampling_logps is not None else x.old_logps, mask
        )
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


def divergence(log_r: torch.Tensor, w: torch.Tensor | None) -> torch.Tensor:
    """k3 of each token, exp(log r) - log r - 1 with log r = lp_ref - lp; times w where its bias is corrected."""
    kl = log_r.exp() - log_r - 1
    return kl if w is None else kl * w


def _capped_divergence(log_r: torch.Tensor, w: torch.Tensor | None) -> torch.Tensor:
    return divergence(log_r.clamp(-KL_LOG_RATIO_CAP, KL_LOG_RATIO_CAP), w).clamp(max=KL_CAP)


def capped_kl(x: Inputs) -> dict[str, torch.Tensor]:
    """The loss with |log r| capped at 20 before k3 and the KL term at 10 after its bias correction, as Unsloth has it.

    A token at the cap (log r above 2.6 or below -11 where nothing is corrected) has no gradient from its KL term.
    """
    return _losses(x, _capped_divergence)


def _mean(values: torch.Tensor, mask: torch.Tensor, keepdim: bool = False) -> torch.Tensor:
    """Σ_t m·v / max(Σ_t m, 1) of each sequence."""
    return (values * mask).sum(-1, keepdim=keepdim) / mask.sum(-1, keepdim=keepdim).clamp(min=1)


def surrogate(
    s: SimpleNamespace,
    lp: torch.Tensor,
    d: torch.Tensor,
    w: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    ratio: torch.Tensor | None,
) -> torch.Tensor:
    """The policy term of each token, (…, B, T) or (…, B, 1), before masks, sampler ratio and KL."""
    if s.loss_type in CLIPPED:
        capped = w if s.delta is None else w.clamp(max=s.delta)
        clipped = w.clamp(1 - s.epsilon, 1 + _epsilon_high(s))
        return -torch.minimum(capped * advantages, clipped * advantages)
    if s.loss_type == "cispo":
        return -w.clamp(max=_epsilon_high(s)).detach() * advantages * lp
    if s.loss_type == "sapo":
        tau = _by_sign(advantages > 0, s.sapo_temperature_pos, s.sapo_temperature_neg)
        return -torch.sigmoid(tau * (w - 1)) * 4 / tau * advantages
    return -vespo_phi(s, d.detach(), advantages, mask, ratio) * advantages * lp


def _by_sign(condition: torch.Tensor, yes: float, no: float) -> torch.Tensor:
    """`torch.where` of two numbers, which would otherwise be rounded to float32."""
    return torch.where(condition, yes, torch.tensor(no, dtype=torch.float64))


def _epsilon_high(s: SimpleNamespace) -> float:
    return s.epsilon if s.epsilon_high is None else s.epsilon_high


def vespo_phi(
    s: SimpleNamespace, d: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor, ratio: torch.Tensor | None
) -> torch.Tensor:
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
    s: SimpleNamespace, lp: torch.Tensor, advantages: torch.Tensor, sampling: torch.Tensor | None, mask: torch.Tensor
) -> torch.Tensor:
    """1 where A ≥ 0 or the sequence mean of (lp_samp - lp) ≤ threshold; tokens the sampler could not score count 0."""
    if sampling is None:  # a drift of 0, which nothing rounds
        return ((advantages >= 0) | (s.off_policy_mask_threshold >= 0)).to(lp.dtype)
    gap = (sampling - lp.detach()).nan_to_num(nan=0.0)
    near = _mean(gap, mask, keepdim=True) <= s.off_policy_mask_threshold
    return ((advantages >= 0) | near).to(lp.dtype)


def entropy_mask(entropy: torch.Tensor, mask: torch.Tensor, quantile: float) -> torch.Tensor:
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


def aggregate(
    s: SimpleNamespace, l: torch.Tensor, mask: torch.Tensor, num_items: float
) -> tuple[torch.Tensor, torch.Tensor]:
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
    s: SimpleNamespace,
    w: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    kl: torch.Tensor | None,
    entropy: torch.Tensor,
) -> dict[str, torch.Tensor]:
    """Means over loss tokens; clip fractions at sequence level: one value a sequence."""

    def mean(values: torch.Tensor, per_sequence: bool = False) -> torch.Tensor:
        if per_sequence and values.shape[-1] == 1:
            return values.to(torch.float64).mean((-2, -1))
        return (values * mask).sum((-2, -1)) / mask.sum().clamp(min=1)

    sequence = s.importance_sampling_level == "sequence"
    out = {"entropy": mean(entropy.detach())}
    if kl is not None:
        out["kl"] = mean(kl.detach())
    high = w > 1 + _epsilon_high(s)
    if s.loss_type in CLIPPED:
        low_clip, high_clip = (w < 1 - s.epsilon) & (advantages < 0), high & (advantages > 0)
        out["clip_low"], out["clip_high"] = mean(low_clip, sequence), mean(high_clip, sequence)
        out["clip_ratio"] = mean(low_clip | high_clip, sequence)
    elif s.loss_type == "cispo":
        out["clip_ratio"] = mean((w > _epsilon_high(s)) & (advantages > 0), sequence)
    return out


def zeros(x: Inputs) -> dict[str, torch.Tensor]:
    """Masked tokens: exactly zero gradient of their hidden states."""
    return {"grad_hidden": ~x.mask.bool()}


def features(case: Case) -> dict[str, Any]:
    """Facts for coverage and ledger scopes besides the settings themselves."""
    s = FAMILY.full_settings(case)
    lengths = s.lengths or [s.T] * s.B
    return head.features(case, s) | {
        "one sequence": s.B == 1,
        "ragged": len(set(lengths)) > 1,
        "padding": any(n < s.T for n in lengths),
        "masked tokens": s.holes or any(n < s.T for n in lengths),
        "empty row": 0 in lengths,
        "all masked": not any(lengths),
        "one position": s.T == 1,
        "delta active": s.delta is not None,
        "kl": s.beta != 0.0,
        "old given": s.old != "absent",
    }


def parameters(x: Inputs) -> set[str]:
    """The tensors, and what changes the loss of this case: nothing of another loss type, or of an absent term."""
    s, table = x.settings, settings_of.SETTINGS

    def moved(*names: str) -> set[str]:
        return {n for n in names if getattr(s, n) != table[n].default}

    out = {*policy_stored.REQUIRED} | moved(
        "temperature", "softcap", "logit_scale", "loss_type", "beta", "entropy_coef"
    )
    out |= moved("importance_sampling_level", "off_policy_mask_threshold")
    out |= moved("epsilon", "epsilon_high", "delta") if s.loss_type in CLIPPED else set()
    out |= moved(*(n for n in table if n.startswith(s.loss_type))) if s.loss_type in ("sapo", "vespo") else set()
    out |= {"cispo": {"epsilon_high"}, "dr_grpo": {"max_completion_length"}}.get(s.loss_type, set())
    if s.beta != 0.0:
        out |= {"ref_logps"} | moved("use_bias_correction_kl")
    if s.loss_type in WINDOW_NORMALISED:
        out |= {"num_items_in_batch"}
        if s.mode == "eval" or s.accumulation != s.steps_per_generation:
            out |= {"accumulation", "steps_per_generation", "mode"}
    elif s.accumulation != 1:
        out |= {"accumulation"} | moved("mode")
    if s.off_policy_mask_threshold is not None and x.sampling_logps is not None:
        out |= {"sampling_logps"}
    optional = ("bias", "old_logps", "importance_sampling_ratio", "top_entropy_quantile", "lora_a")
    return (
        out | {n for n in optional if x.tensors.get(n) is not None} | ({"previous_ids"} if s.head == "tied" else set())
    )


def _double_advantages(x: Inputs) -> Inputs | None:
    s = x.settings
    if s.beta != 0.0 or s.entropy_coef != 0.0:
        return None  # the KL and the bonus do not scale with the advantages
    return x.replace(advantages=like(x.advantages * 2, x.advantages))


def _garbage(x: Inputs) -> Inputs | None:
    """Finite garbage wherever the mask is zero, except in the sampler ratio, which is 1 at padding by contract.

    None of it makes an exponential of two log-probs larger: that would overflow, mask or not.
    """
    masked = ~x.mask.bool()
    if not masked.any() or x.settings.targets == "edge":
        return None
    tensors = {}
    if x.settings.beta == 0.0 and x.old_logps is None:
        allowed = (
            torch.ones(x.settings.V, device=x.ids.device) if x.bias is None else x.bias.isfinite()
        )  # a banned token's log-prob is -inf
        ids = allowed.nonzero().squeeze(-1)
        other = ids[(torch.searchsorted(ids, x.ids.long().contiguous()) + 1) % len(ids)]
        tensors["ids"] = like(torch.where(masked, other, x.ids).to(x.ids.dtype), x.ids)
    for name in ("old_logps", "ref_logps", "sampling_logps"):
        value = x.tensors.get(name)
        if value is not None:
            tensors[name] = like(torch.where(masked, value + (3.5 if name == "old_logps" else -3.5), value), value)
    return x.replace(**tensors)


def _build(case: Case) -> Inputs:
    s = FAMILY.full_settings(case)
    return policy_stored.build(FAMILY, case, s) if case.tensors else inputs_of.build(case, s)


QUANTITIES = ("loss", "grad_hidden", "grad_weight", "grad_bias")

FAMILY: Family = Family(
    name="policy",
    settings=settings_of.SETTINGS,
    build=_build,
    oracle=oracle,
    outputs={
        "loss": "required",
        "kl": "optional",
        "entropy": "optional",
        "clip_ratio": "counted",
        "clip_low": "counted",
        "clip_high": "counted",
    },
    zeros=zeros,
    features=features,
    variants={"capped KL": capped_kl},
    parameters=parameters,
    draw=settings_of.draw,
    canonical=settings_of.canonical,
    stored=policy_stored.TENSORS,
    derived=lambda tensors, where: policy_stored.derived(FAMILY, tensors, where),
    relations={
        "advantages x2": Relation(
            _double_advantages, dict.fromkeys(QUANTITIES, 2.0), "the loss is linear in the advantages"
        ),
        "masked garbage": Relation(_garbage, {}, "what the mask hides changes nothing"),
    },
)
