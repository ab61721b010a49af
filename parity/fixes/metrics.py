"""What the policy loss logs: means over all ranks, by TRL's names."""

import math
from typing import Any

import torch
from torch import Tensor

from parity.fixes import policy


class PolicyMetrics(dict[str, Tensor]):
    """Metrics by TRL's names. An integer indexes Liger's pair instead: [0] the KL (if beta != 0), [-1] the clipping."""

    def __missing__(self, key: object) -> Tensor:
        if not isinstance(key, int):
            raise KeyError(key)
        clipped = self.get("clip_ratio/region_mean", self.get("cispo_clip_ratio"))
        pair = [self["kl"]] if "kl" in self else []
        return [*pair, torch.zeros_like(next(iter(self.values()))) if clipped is None else clipped][key]


@torch.no_grad()
def measure(
    s: Any,
    w: Tensor,
    advantages: Tensor,
    kl: Tensor | None,
    entropies: Tensor,
    phi: Tensor | None,
    policy_loss: Tensor | None,
    mask: Tensor,
) -> PolicyMetrics:
    """Metrics of one micro-batch of the loss `s`; kl, phi and policy_loss where there are any.

    w (B, T), or (B, 1) at the level of sequences; advantages (B, 1) or (B, T); kl, entropies and mask (B, T); phi (B, 1) or
    (B, T). Detached float32 scalars, all-reduced together.
    """
    values: dict[str, Tensor] = {} if kl is None else {"kl": kl}
    values["entropy"] = entropies
    rows: dict[str, Tensor] = {}
    if s.loss_type in policy.CLIPPED:
        low = (w < 1 - s.epsilon_low) & (advantages < 0)
        high = (w > 1 + s.epsilon_high) & (advantages > 0)
        values |= {
            "clip_ratio/low_mean": low,
            "clip_ratio/high_mean": high,
            "clip_ratio/region_mean": low | high,
        }
        rows = {"clip_ratio/low_min": low, "clip_ratio/high_max": high}
    elif s.loss_type == "cispo":
        values["cispo_clip_ratio"] = (w > s.epsilon_high) & (advantages > 0)
    elif phi is not None:
        values["vespo/phi_seq_mean"] = phi

    def per_sequence(x: Tensor) -> bool:
        if x is kl or x is entropies or x.shape[1] > 1:  # with T = 1 the shape alone does not tell
            return False
        return s.importance_sampling_level == "sequence" or x is phi

    sums, counts = [], []
    for x in values.values():
        weights = torch.ones_like(x, dtype=torch.bool) if per_sequence(x) else mask
        sums.append((x * weights).sum().to(w.dtype))
        counts.append(weights.sum().to(w.dtype))
    if policy_loss is not None:
        values["policy_loss"] = policy_loss
        sums.append(policy_loss.detach())
        counts.append(torch.ones_like(policy_loss))
    totals = policy.over_ranks(torch.stack([torch.stack(sums), torch.stack(counts)]))
    means = (totals[0] / totals[1].clamp(min=1)).float()
    metrics = PolicyMetrics(zip(values, means.unbind(), strict=True))
    for name, x in rows.items():
        share = x[:, 0].to(w.dtype) if per_sequence(x) else (x * mask).sum(1) / mask.sum(1).to(w.dtype)
        sign = 1.0 if name.endswith("max") else -1.0
        scored = torch.cat([(sign * share)[~share.isnan()], share.new_full((1,), -math.inf)])
        best = policy.over_ranks(scored.amax(), "MAX")
        metrics[name] = torch.where(best == -math.inf, math.nan, sign * best).float()
    return metrics
