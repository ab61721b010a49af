"""Controls of family `policy`: a correct float32 loss, from the papers and TRL's documentation, cut into steps.

Each step is a function of what the steps before it found. `REORDERED` exchanges some for others that are as right; a
mutant exchanges one for one that is wrong.
"""

import math
from collections.abc import Callable
from types import SimpleNamespace

import torch

from cases.selftest.controls.logprobs import Pair, Steps
from parity.case.inputs import Inputs
from parity.implementations.implementation import Adapter, Outputs

Work = SimpleNamespace
"""What has been found so far: x, s (settings), logps, entropy, and the result of every step under its name."""
Step = Callable[[Work], torch.Tensor]


def mask(c: Work) -> torch.Tensor:
    return c.x.mask.float()


def lengths(c: Work) -> torch.Tensor:
    """max(|o_i|, 1), (B, 1)."""
    return c.mask.sum(1, keepdim=True).clamp(min=1.0)


def advantages(c: Work) -> torch.Tensor:
    return c.x.advantages if c.x.advantages.dim() == 2 else c.x.advantages[:, None]


def log_ratio(c: Work) -> torch.Tensor:
    """log π - log π_old of the tokens that count; of others 0, so that none overflows."""
    ratio = c.logps - (c.logps.detach() if c.x.old_logps is None else c.x.old_logps)
    return ratio.masked_fill(c.mask == 0, 0.0)


def weight(c: Work) -> torch.Tensor:
    """The importance weight, (B, T) or at sequence level (B, 1)."""
    if c.s.importance_sampling_level == "token":
        return c.log_ratio.exp()
    return ((c.log_ratio * c.mask).sum(1, keepdim=True) / c.lengths).exp()


def upper(s: SimpleNamespace) -> float:
    """ε_hi."""
    return s.epsilon if s.epsilon_high is None else s.epsilon_high


def capped(c: Work) -> torch.Tensor:
    """min(w, δ)."""
    return c.weight if c.s.delta is None else c.weight.clamp(max=c.s.delta)


def clipped(c: Work) -> torch.Tensor:
    return c.weight.clamp(1 - c.s.epsilon, 1 + upper(c.s))


def clip(c: Work) -> torch.Tensor:
    """The clipped surrogate."""
    return -torch.minimum(c.capped * c.advantages, c.clipped * c.advantages)


def cispo(c: Work) -> torch.Tensor:
    return -(c.weight.clamp(max=upper(c.s)).detach() * c.advantages) * c.logps


def sapo(c: Work) -> torch.Tensor:
    tau = torch.where(c.advantages > 0, c.s.sapo_temperature_pos, c.s.sapo_temperature_neg)
    return -(tau * (c.weight - 1)).sigmoid() * 4 / tau * c.advantages


def log_w(c: Work) -> torch.Tensor:
    """vespo's clamped sum of log-ratios and log sampler ratios, (B, 1)."""
    floor = math.log(1e-8)
    total = (c.log_ratio.detach().clamp(-20, 20) * c.mask).sum(1, keepdim=True)
    if c.x.importance_sampling_ratio is not None:
        total = total + c.x.importance_sampling_ratio.log().clamp(floor, 20).sum(1, keepdim=True)
    return total.clamp(floor, 20)


def phi(c: Work) -> torch.Tensor:
    k = torch.where(c.advantages >= 0, c.s.vespo_k_pos, c.s.vespo_k_neg)
    lam = torch.where(c.advantages >= 0, c.s.vespo_lambda_pos, c.s.vespo_lambda_neg)
    return (lam + k * c.log_w - lam * c.log_w.exp()).exp()


def vespo(c: Work) -> torch.Tensor:
    return -(c.phi * c.advantages) * c.logps


def surrogate(c: Work) -> torch.Tensor:
    """The policy term by loss type."""
    return getattr(c, c.s.loss_type if c.s.loss_type in ("cispo", "sapo", "vespo") else "clip")


def on_policy(c: Work) -> torch.Tensor:
    """The off-policy sequence mask."""
    if c.s.off_policy_mask_threshold is None:
        return torch.ones_like(c.mask)
    sampled = c.x.old_logps if c.x.sampling_logps is None else c.x.sampling_logps
    gap = torch.zeros_like(c.mask) if sampled is None else torch.nan_to_num(sampled - c.logps.detach(), nan=0.0)
    drift = (gap * c.mask).sum(1, keepdim=True) / c.lengths
    return ((c.advantages >= 0) | (drift <= c.s.off_policy_mask_threshold)).float()


def keep(c: Work) -> torch.Tensor:
    """The entropy mask times the loss mask."""
    if c.x.top_entropy_quantile is None or not bool(c.mask.any()):
        return c.mask
    threshold = torch.quantile(c.entropy.detach()[c.mask.bool()], 1 - float(c.x.top_entropy_quantile))
    return c.mask * (c.entropy.detach() >= threshold)


def ratio(c: Work) -> torch.Tensor:
    """The sampler's importance ratio, where it multiplies the surrogate."""
    rho = c.x.importance_sampling_ratio
    return torch.ones_like(c.mask) if rho is None or c.s.loss_type == "vespo" else rho


def log_r(c: Work) -> torch.Tensor:
    return c.logps * 0 if c.s.beta == 0.0 else (c.x.ref_logps - c.logps).masked_fill(c.mask == 0, 0.0)


def k3(c: Work) -> torch.Tensor:
    return c.log_r.exp() - c.log_r - 1


def kl(c: Work) -> torch.Tensor:
    return c.k3 * c.weight if c.s.use_bias_correction_kl and c.s.beta != 0.0 else c.k3


def token(c: Work) -> torch.Tensor:
    """The per-token loss, (B, T)."""
    loss = (c.on_policy * c.keep * c.ratio * c.surrogate).expand(c.logps.shape)
    return loss if c.s.beta == 0.0 else loss + c.s.beta * c.kl


def steps(c: Work) -> torch.Tensor:
    """Accumulation steps: in evaluation there is one micro-batch."""
    return torch.tensor(float(c.s.accumulation if c.s.mode == "train" else 1))


def window(c: Work) -> torch.Tensor:
    """The window's share of the generation batch."""
    return torch.tensor(c.s.accumulation / c.s.steps_per_generation if c.s.mode == "train" else 1.0)


def items(c: Work) -> torch.Tensor:
    """Loss tokens of the generation batch over all ranks."""
    return c.x.num_items_in_batch.float().clamp(min=1.0)


def divisors(c: Work) -> dict[str, torch.Tensor]:
    """What Σ m·l is divided by, by loss type; of each sequence for grpo and sapo."""
    rows = float(len(c.mask))
    of_means = c.lengths * rows * c.steps
    of_items = c.items * c.window
    return {
        "grpo": of_means,
        "sapo": of_means,
        "bnpo": c.mask.sum().clamp(min=1.0) * c.steps,
        "dr_grpo": rows * c.s.max_completion_length * c.steps,
        "luspo": rows * c.steps,
        "dapo": of_items,
        "cispo": of_items,
        "vespo": of_items,
    }


def divisor(c: Work) -> torch.Tensor:
    return divisors(c)[c.s.loss_type]


def policy_loss(c: Work) -> torch.Tensor:
    return (torch.where(c.mask > 0, c.token, 0.0) / c.divisor).sum()


def bonus(c: Work) -> torch.Tensor:
    return c.s.entropy_coef * (c.entropy * c.keep).sum() / c.keep.sum().clamp(min=1.0) / c.steps


def loss(c: Work) -> torch.Tensor:
    return c.policy_loss if c.s.entropy_coef == 0.0 else c.policy_loss - c.bonus


ORDER: dict[str, Step] = {
    step.__name__: step
    for step in (
        mask, lengths, advantages, log_ratio, weight, capped, clipped, clip, cispo, sapo, log_w, phi, vespo, surrogate,
        on_policy, keep, ratio, log_r, k3, kl, token, steps, window, items, divisor, policy_loss, bonus, loss,
    )
}  # fmt: skip
"""The steps in the order in which they are taken."""
LAZY = {"cispo": "cispo", "sapo": "sapo", "log_w": "vespo", "phi": "vespo", "vespo": "vespo"}
"""Steps that belong to one loss type."""


def _reordered_weight(c: Work) -> torch.Tensor:
    if c.s.importance_sampling_level == "token":
        return c.log_ratio.exp()
    return (c.log_ratio * (c.mask / c.lengths)).sum(1, keepdim=True).exp()


def _reordered_clip(c: Work) -> torch.Tensor:
    return torch.maximum(-c.advantages * c.capped, -c.advantages * c.clipped)


def _reordered_sapo(c: Work) -> torch.Tensor:
    tau = torch.where(c.advantages > 0, c.s.sapo_temperature_pos, c.s.sapo_temperature_neg)
    return -c.advantages * (1 / (1 + (-tau * (c.weight - 1)).exp()) * (4 / tau))


def _reordered_phi(c: Work) -> torch.Tensor:
    k = torch.where(c.advantages >= 0, c.s.vespo_k_pos, c.s.vespo_k_neg)
    lam = torch.where(c.advantages >= 0, c.s.vespo_lambda_pos, c.s.vespo_lambda_neg)
    return (lam * (1 - c.log_w.exp()) + k * c.log_w).exp()


def _reordered_sum(c: Work) -> torch.Tensor:
    if c.s.loss_type in ("grpo", "sapo"):
        return (torch.where(c.mask > 0, c.token, 0.0).sum(1, keepdim=True) / c.lengths).mean() / c.steps
    return torch.where(c.mask > 0, c.token, 0.0).sum(0).sum() * (1 / c.divisor)


REORDERED: dict[str, Step] = {
    "weight": _reordered_weight,
    "clip": _reordered_clip,
    "sapo": _reordered_sapo,
    "phi": _reordered_phi,
    "k3": lambda c: torch.expm1(c.log_r) - c.log_r,
    "policy_loss": _reordered_sum,
}
"""The same formulas in another order of operations."""


def mean_of_tokens(c: Work, values: torch.Tensor) -> torch.Tensor:
    """A metric: Σ m·v / max(Σ m, 1)."""
    return (values * c.mask).sum() / c.mask.sum().clamp(min=1.0)


def kl_metric(c: Work) -> torch.Tensor:
    return mean_of_tokens(c, c.kl.detach())


def entropy_metric(c: Work) -> torch.Tensor:
    return mean_of_tokens(c, c.entropy.detach())


def too_low(c: Work) -> torch.Tensor:
    """Where the lower clip binds."""
    return (c.weight < 1 - c.s.epsilon) & (c.advantages < 0)


def too_high(c: Work) -> torch.Tensor:
    """Where the upper one does; cispo's ε_hi is the limit itself."""
    limit = upper(c.s) if c.s.loss_type == "cispo" else 1 + upper(c.s)
    return (c.weight > limit) & (c.advantages > 0)


def share(c: Work, clipped: torch.Tensor) -> torch.Tensor:
    """A clip metric: of tokens, or of sequences where each has one weight."""
    if clipped.shape[1] == 1 and c.s.importance_sampling_level == "sequence":
        return clipped.float().mean()
    return mean_of_tokens(c, clipped)


def clip_ratio(c: Work) -> torch.Tensor:
    return share(c, too_high(c) if c.s.loss_type == "cispo" else too_low(c) | too_high(c))


METRICS: dict[str, Step] = {
    "kl": kl_metric,
    "entropy": entropy_metric,
    "clip_ratio": clip_ratio,
    "clip_low": lambda c: share(c, too_low(c)),
    "clip_high": lambda c: share(c, too_high(c)),
}
"""What a loss may tell beside its value."""


def _offered(name: str, s: SimpleNamespace) -> bool:
    """Whether a loss of these settings has the metric."""
    if name == "kl":
        return bool(s.beta != 0.0)
    unclipped = ("sapo", "vespo") if name == "clip_ratio" else ("sapo", "vespo", "cispo")
    return name == "entropy" or s.loss_type not in unclipped


def loss_of(
    head: Callable[[Inputs], Pair] | None = None, metrics: dict[str, Step] | None = None, **edits: Step
) -> Adapter:
    """An adapter of family `policy` that takes the steps of `ORDER` except for those in `edits`.

    `head`: from inputs to log-probs and entropies, (B, T).
    """
    order, offered, pair = ORDER | edits, metrics or {}, head or Steps().head

    def adapter(x: Inputs) -> Outputs:
        c = SimpleNamespace(x=x, s=x.settings)
        c.logps, c.entropy = (value.float() for value in pair(x))
        for name, step in order.items():
            if LAZY.get(name) in (None, x.settings.loss_type):
                setattr(c, name, step(c))
        return {"loss": c.loss} | {name: step(c) for name, step in offered.items() if _offered(name, x.settings)}

    return adapter
