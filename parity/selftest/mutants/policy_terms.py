"""Mutants of family `policy` in the terms of the loss: clipping, sequence level, KL, detach, entropy."""

import torch

from parity.selftest.controls import policy as right
from parity.selftest.controls.policy import Work, upper
from parity.selftest.mutants.steps import Mutants, recorder

MUTANTS: Mutants = {}
_wrong = recorder(MUTANTS)

_wrong(
    "clip-maximum",
    "clip sides swapped: maximum for minimum",
    clip=lambda c: -torch.maximum(c.capped * c.advantages, c.clipped * c.advantages),
)
_wrong("clip-not-pessimistic", "clipped surrogate alone, without the minimum", clip=lambda c: -c.clipped * c.advantages)
_wrong("clip-forgotten", "no clipping", clip=lambda c: -c.capped * c.advantages)
_wrong(
    "epsilons-swapped",
    "epsilon low and high swapped",
    clipped=lambda c: c.weight.clamp(1 - upper(c.s), 1 + c.s.epsilon),
)
_wrong(
    "epsilon-high-ignored", "epsilon_high ignored", clipped=lambda c: c.weight.clamp(1 - c.s.epsilon, 1 + c.s.epsilon)
)
_wrong("delta-forgotten", "delta forgotten", capped=lambda c: c.weight)
_wrong(
    "delta-on-clipped",
    "delta on the clipped coefficient",
    capped=lambda c: c.weight,
    clipped=lambda c: right.clipped(c) if c.s.delta is None else right.clipped(c).clamp(max=c.s.delta),
)
_wrong(
    "delta-on-product",
    "delta caps the product with the advantage",
    clip=lambda c: right.clip(c) if c.s.delta is None else _product_capped(c),
)
_wrong(
    "cispo-one-plus",
    "cispo: bound 1 + ε for ε",
    cispo=lambda c: -(c.weight.clamp(max=1 + upper(c.s)).detach() * c.advantages) * c.logps,
)
_wrong(
    "cispo-lower-bound",
    "cispo: lower bound 1 - ε as well",
    cispo=lambda c: -(c.weight.clamp(1 - c.s.epsilon, upper(c.s)).detach() * c.advantages) * c.logps,
)
_wrong(
    "sapo-temperatures-swapped",
    "sapo: temperatures of the signs swapped",
    sapo=lambda c: _sapo(c, c.s.sapo_temperature_neg, c.s.sapo_temperature_pos),
)
_wrong(
    "sapo-unscaled",
    "sapo: 4/τ forgotten",
    sapo=lambda c: (
        right.sapo(c) * torch.where(c.advantages > 0, c.s.sapo_temperature_pos, c.s.sapo_temperature_neg) / 4
    ),
)
_wrong("vespo-unclamped", "vespo: W not clamped below", log_w=lambda c: _total(c).clamp(max=20))
_wrong("vespo-mean", "vespo: mean of log-ratios for their sum", log_w=lambda c: right.log_w(c) / c.lengths)
_wrong(
    "vespo-signs-swapped",
    "vespo: k and λ of the signs swapped",
    phi=lambda c: right.phi(Work(s=c.s, log_w=c.log_w, advantages=torch.where(c.advantages >= 0, -1.0, 1.0))),
)


def _sapo(c: Work, positive: float, negative: float) -> torch.Tensor:
    tau = torch.where(c.advantages > 0, positive, negative)
    return -(tau * (c.weight - 1)).sigmoid() * 4 / tau * c.advantages


def _product_capped(c: Work) -> torch.Tensor:
    return -torch.minimum((c.weight * c.advantages).clamp(max=c.s.delta), c.clipped * c.advantages)


def _total(c: Work) -> torch.Tensor:
    total = (c.log_ratio.detach().clamp(-20, 20) * c.mask).sum(1, keepdim=True)
    rho = c.x.importance_sampling_ratio
    return total if rho is None else total + rho.clamp(min=1e-8).log().clamp(max=20).sum(1, keepdim=True)


_wrong(
    "sequence-sum",
    "sequence ratio from the sum of log-ratios, not their mean",
    weight=lambda c: (
        right.weight(c)
        if c.s.importance_sampling_level == "token"
        else (c.log_ratio * c.mask).sum(1, keepdim=True).exp()
    ),
)
_wrong(
    "sequence-mean-with-padding",
    "sequence ratio from the mean over padding too",
    weight=lambda c: (
        right.weight(c)
        if c.s.importance_sampling_level == "token"
        else (c.log_ratio * c.mask).mean(1, keepdim=True).exp()
    ),
)
_wrong("sequence-as-token", "sequence level taken for token level", weight=lambda c: c.log_ratio.exp())
_wrong(
    "token-as-sequence",
    "token level taken for sequence level",
    weight=lambda c: ((c.log_ratio * c.mask).sum(1, keepdim=True) / c.lengths).exp(),
)

_wrong("kl-sign", "KL with its arguments swapped", log_r=lambda c: -right.log_r(c))
_wrong("kl-subtracted", "KL subtracted", kl=lambda c: -right.kl(c))
_wrong("kl-k1", "k1 for k3", k3=lambda c: -c.log_r)
_wrong("kl-k2", "k2 for k3", k3=lambda c: c.log_r.square() / 2)
_wrong("kl-without-gradient", "KL without gradient", kl=lambda c: right.kl(c).detach())
_wrong("kl-forgotten", "KL forgotten", kl=lambda c: right.kl(c) * 0)
_wrong("bias-correction-dropped", "bias correction dropped", kl=lambda c: c.k3)
_wrong(
    "bias-correction-twice",
    "bias correction applied twice",
    kl=lambda c: c.k3 * c.weight.square() if c.s.use_bias_correction_kl else c.k3,
)
_wrong(
    "bias-correction-detached",
    "detach added: bias correction without gradient",
    kl=lambda c: c.k3 * c.weight.detach() if c.s.use_bias_correction_kl else c.k3,
)
_wrong(
    "bias-correction-capped",
    "delta caps the bias correction",
    kl=lambda c: c.k3 * right.capped(c) if c.s.use_bias_correction_kl else c.k3,
)
_wrong(
    "kl-not-masked",
    "KL not masked",
    log_r=lambda c: c.logps * 0 if c.s.beta == 0.0 else c.x.ref_logps - c.logps,
    policy_loss=lambda c: right.policy_loss(c) + c.s.beta * ((1 - c.mask) * c.kl / c.divisor).sum(),
)
_wrong(
    "kl-metric-of-means",
    "KL metric: mean of means",
    metrics={"kl": lambda c: ((c.kl * c.mask).sum(1) / c.lengths[:, 0]).mean().detach()},
)
_wrong("kl-metric-not-masked", "KL metric over padding", metrics={"kl": lambda c: c.kl.mean().detach()})
_wrong(
    "entropy-metric-kept",
    "entropy metric of the kept tokens alone",
    metrics={"entropy": lambda c: (c.entropy * c.keep).sum().detach() / c.keep.sum().clamp(min=1.0)},
)

_wrong("weight-detached", "detach added: importance weight without gradient", weight=lambda c: right.weight(c).detach())
_wrong(
    "cispo-not-detached",
    "detach missing: gradient through cispo's coefficient",
    cispo=lambda c: -(c.weight.clamp(max=upper(c.s)) * c.advantages) * c.logps,
)
_wrong("phi-not-detached", "detach missing: gradient through vespo's φ", log_w=lambda c: _attached(c))
_wrong(
    "old-not-detached",
    "detach missing: absent old log-probs are the policy's, with gradient",
    log_ratio=lambda c: c.logps - (c.logps if c.x.old_logps is None else c.x.old_logps),
)
_wrong(
    "off-policy-inverted",
    "off-policy mask inverted",
    on_policy=lambda c: right.on_policy(c) if c.s.off_policy_mask_threshold is None else 1 - right.on_policy(c),
)
_wrong("off-policy-forgotten", "off-policy mask forgotten", on_policy=lambda c: torch.ones_like(c.mask))
_wrong(
    "off-policy-positive",
    "off-policy mask drops A ≥ 0 as well",
    on_policy=lambda c: right.on_policy(Work(**vars(c) | {"advantages": -torch.ones_like(c.advantages)})),
)
_wrong("off-policy-nan", "unscorable tokens: NaN drift drops the sequence", on_policy=lambda c: _nan_drift(c))
_wrong(
    "off-policy-old",
    "off-policy drift from the old log-probs, not the sampler's",
    on_policy=lambda c: right.on_policy(Work(**vars(c) | {"x": c.x.replace(sampling_logps=None)})),
)
_wrong(
    "off-policy-token", "off-policy mask by token, not by sequence", on_policy=lambda c: _on_policy(c, by_token=True)
)
_wrong(
    "off-policy-strict",
    "off-policy mask drops a drift equal to its threshold",
    on_policy=lambda c: _on_policy(c, hair=1e-30),
)
_wrong(
    "off-policy-zero",
    "an off-policy threshold of 0 taken for none",
    on_policy=lambda c: right.on_policy(c) if c.s.off_policy_mask_threshold else torch.ones_like(c.mask),
)
_wrong(
    "entropy-mask-strict",
    "entropy mask drops the token at the quantile",
    keep=lambda c: c.mask if c.x.top_entropy_quantile is None else c.mask * (c.entropy.detach() > _threshold(c)),
)
_wrong(
    "clip-metric-inclusive",
    "clip fraction counts a ratio on the bound",
    metrics={"clip_ratio": lambda c: right.clip_ratio(_over(c))},
)
_wrong("entropy-mask-forgotten", "entropy mask forgotten", keep=lambda c: c.mask)
_wrong(
    "entropy-mask-inverted",
    "entropy mask keeps the lowest",
    keep=lambda c: c.mask if c.x.top_entropy_quantile is None else c.mask * (1 - right.keep(c)),
)
_wrong(
    "entropy-mask-over-padding",
    "entropy quantile over padding too",
    keep=lambda c: (
        c.mask
        if c.x.top_entropy_quantile is None
        else c.mask * (c.entropy.detach() >= torch.quantile(c.entropy.detach(), 1 - float(c.x.top_entropy_quantile)))
    ),
)
_wrong("bonus-sign", "entropy bonus added to the loss", bonus=lambda c: -right.bonus(c))
_wrong("bonus-forgotten", "entropy bonus forgotten", bonus=lambda c: right.bonus(c) * 0)
_wrong("bonus-without-gradient", "gradient of the entropy bonus missing", bonus=lambda c: right.bonus(c).detach())
_wrong(
    "bonus-not-accumulated",
    "entropy bonus not divided by the accumulation steps",
    bonus=lambda c: right.bonus(c) * c.steps,
)
_wrong(
    "bonus-over-all",
    "entropy bonus over masked tokens too",
    bonus=lambda c: c.s.entropy_coef * c.entropy.mean() / c.steps,
)


def _attached(c: Work) -> torch.Tensor:
    """`log_w` with the gradient of its log-ratios."""
    total = right.log_w(c)
    return total + ((c.log_ratio - c.log_ratio.detach()) * c.mask).sum(1, keepdim=True)


def _over(c: Work) -> Work:
    """With ratios larger by one or two spacings of float32."""
    return Work(**vars(c) | {"weight": c.weight.detach() * (1 + 2**-22)})


def _threshold(c: Work) -> torch.Tensor:
    """The entropy that the entropy mask asks for; that of no token without tokens."""
    entropies = c.entropy.detach()[c.mask.bool()]
    quantile = 1 - float(c.x.top_entropy_quantile)
    return torch.quantile(entropies, quantile) if len(entropies) else c.entropy.new_tensor(torch.inf)


def _on_policy(c: Work, by_token: bool = False, hair: float = 0.0) -> torch.Tensor:
    """The off-policy mask, of tokens, or for drifts below its threshold by a hair."""
    if c.s.off_policy_mask_threshold is None:
        return right.on_policy(c)
    sampled = c.x.old_logps if c.x.sampling_logps is None else c.x.sampling_logps
    gap = torch.zeros_like(c.mask) if sampled is None else torch.nan_to_num(sampled - c.logps.detach(), nan=0.0)
    drift = gap if by_token else (gap * c.mask).sum(1, keepdim=True) / c.lengths
    return ((c.advantages >= 0) | (drift <= c.s.off_policy_mask_threshold - hair)).float()


def _nan_drift(c: Work) -> torch.Tensor:
    if c.s.off_policy_mask_threshold is None or c.x.sampling_logps is None:
        return right.on_policy(c)
    drift = ((c.x.sampling_logps - c.logps.detach()) * c.mask).sum(1, keepdim=True) / c.lengths
    return ((c.advantages >= 0) | (drift <= c.s.off_policy_mask_threshold)).float()
