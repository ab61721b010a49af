"""The policy losses on (B, T) log-probs: per-token surrogates, masks and weights, each by its formula.

Everything here is small next to the logits, so it is written for precision: callers pass float64 where the device has
it, and masked positions hold neutral values (log ratio 0, advantage 0, importance ratio 1), never garbage times zero.

Notation: A advantages (B, 1) or (B, T); d = lp - lp_old (B, T); w = exp(d) (B, T), or per sequence (B, 1); m the loss
mask. Sources: TRL 1.16.0 `GRPOTrainer._compute_loss` for the semantics, and the papers named at each function.
"""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")
CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
WINDOW_NORMALISED = ("dapo", "cispo", "vespo")


def world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def over_ranks(x: Tensor, op: str = "SUM") -> Tensor:
    """`x` reduced over all ranks; `x` itself in a single process."""
    if world_size() == 1:
        return x
    x = x.clone()
    dist.all_reduce(x, op=getattr(dist.ReduceOp, op))
    return x


def gathered(x: Tensor) -> Tensor:
    """The 1-dimensional `x` of all ranks, whatever their lengths, in one tensor."""
    if world_size() == 1:
        return x
    length = torch.tensor([x.numel()], device=x.device)
    lengths = [torch.zeros_like(length) for _ in range(world_size())]
    dist.all_gather(lengths, length)
    sizes = [int(n) for n in lengths]
    padded = torch.cat([x, x.new_zeros(max(sizes) - x.numel())])
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def log_weights(log_ratio: Tensor, mask: Tensor, level: str) -> Tensor:
    """`d` at token level; its masked mean over the sequence, (B, 1), at sequence level (GSPO, arXiv 2507.18071)."""
    if level == "token":
        return log_ratio
    lengths = mask.sum(1, keepdim=True).clamp(min=1)
    return (log_ratio * mask).sum(1, keepdim=True) / lengths


def bounded_exp(x: Tensor) -> Tensor:
    """`exp(x)`, finite for every x: beyond e^689 in float64 the last value and its slope go on.

    What overflows would make NaN of every product with 0: an advantage of 0, the gradient of a clipped weight. The 20
    below the logarithm of the largest number leave room for advantages and ratios.
    """
    top = math.log(torch.finfo(x.dtype).max) - 20
    return torch.exp(torch.where(x > top, top + (x - x.detach()), x))


def clipped_surrogate(w: Tensor, advantages: Tensor, low: float, high: float, delta: float | None) -> Tensor:
    """`-min(min(w, delta) A, clip(w, 1 - low, 1 + high) A)`; delta is INTELLECT-2's second bound."""
    clipped = torch.clamp(w, 1 - low, 1 + high)
    bounded = w if delta is None else torch.clamp(w, max=delta)
    return -torch.min(bounded * advantages, clipped * advantages)


def cispo_surrogate(w: Tensor, advantages: Tensor, logps: Tensor, high: float) -> Tensor:
    """`-stopgrad(min(w, high)) A lp` (arXiv 2506.13585): `high` bounds the weight itself, not its excess over 1."""
    return -torch.clamp(w, max=high).detach() * advantages * logps


def sapo_surrogate(w: Tensor, advantages: Tensor, tau_pos: float, tau_neg: float) -> Tensor:
    """`-sigmoid(tau (w - 1)) (4 / tau) A`, tau by the sign of A (arXiv 2511.20347)."""
    tau = _either(advantages > 0, tau_pos, tau_neg, w.dtype)
    return -torch.sigmoid(tau * (w - 1)) * 4 / tau * advantages


def vespo_weights(s: Any, log_ratio: Tensor, mask: Tensor, advantages: Tensor, ratio: Tensor | None) -> Tensor:
    """`phi = exp(rate + k log W - rate W)` without gradient (arXiv 2602.10693); k and the rate lambda of `s` by the sign of A.

    `log W` is the sum of the log ratios, each clamped to +-20, and of the logs of the sampler's `ratio` (B, T) or
    (B, 1), clamped to [log 1e-8, 20], like the total.
    """
    floor = math.log(1e-8)
    log_w = (log_ratio.detach().clamp(-20.0, 20.0) * mask).sum(1, keepdim=True)
    if ratio is not None:
        log_w = log_w + ratio.log().clamp(floor, 20.0).sum(1, keepdim=True)
    log_w = log_w.clamp(floor, 20.0)
    upward = advantages >= 0
    k = _either(upward, s.vespo_k_pos, s.vespo_k_neg, log_w.dtype)
    rate = _either(upward, s.vespo_lambda_pos, s.vespo_lambda_neg, log_w.dtype).clamp(min=1e-4)
    return torch.exp(rate + k * log_w - rate * log_w.exp())


def _either(condition: Tensor, yes: float, no: float, dtype: torch.dtype) -> Tensor:
    # torch.where on two Python numbers would round them to float32.
    options = torch.tensor([no, yes], dtype=dtype, device=condition.device)
    return options[condition.long()]


def k3(ref_logps: Tensor, logps: Tensor) -> Tensor:
    """`exp(x) - x - 1` with `x = lp_ref - lp`, Schulman's third estimator of KL(policy || reference)."""
    x = ref_logps - logps
    return torch.expm1(x) - x


def keep_on_policy(logps: Tensor, sampling: Tensor, mask: Tensor, advantages: Tensor, threshold: float) -> Tensor:
    """True where A >= 0 or the sequence's mean of `lp_samp - lp` is at most `threshold` (arXiv 2512.02556).

    Tokens that the sampler could not score (NaN) count 0.
    """
    drift = sampling - logps.detach()
    drift = torch.where(mask & ~drift.isnan(), drift, 0.0)
    mean = drift.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
    return (advantages >= 0) | (mean <= threshold)


def keep_high_entropy(entropies: Tensor, mask: Tensor, quantile: float) -> Tensor:
    """True for the top `quantile` of entropies among the unmasked tokens of all ranks (arXiv 2506.01939)."""
    pool = gathered(entropies.detach()[mask]).sort().values
    if pool.numel() == 0:
        return torch.zeros_like(mask)
    # torch.quantile interpolates in the same way but refuses more than 2**24 values.
    position = (1 - quantile) * (pool.numel() - 1)
    low = min(max(math.floor(position), 0), pool.numel() - 1)
    high = min(low + 1, pool.numel() - 1)
    threshold = torch.lerp(pool[low], pool[high], position - low)
    return mask & (entropies.detach() >= threshold)


def aggregate(
    s: Any, loss: Tensor, mask: Tensor, num_items: Tensor | float | None, accumulation: float, per_generation: float
) -> Tensor:
    """The mean of the per-token loss, (B, T) or (B, 1), that the type of `s` is; see `FusedLinearGRPOLoss` for the formulas."""
    summed = (loss * mask).sum(1)
    lengths = mask.sum(1)
    if s.loss_type in ("grpo", "sapo"):
        return (summed / lengths.clamp(min=1)).sum() / max(mask.shape[0], 1)
    if s.loss_type == "bnpo":
        return summed.sum() / lengths.sum().clamp(min=1)
    if s.loss_type == "dr_grpo":
        return summed.sum() / max(mask.shape[0] * s.max_completion_length, 1)
    if s.loss_type == "luspo":
        return summed.sum() / max(mask.shape[0], 1)
    if num_items is None:
        tokens = over_ranks(lengths.sum()).to(loss.dtype)
        return summed.sum() / (tokens.clamp(min=1) / world_size() * accumulation)
    tokens = torch.as_tensor(num_items, device=loss.device).detach().to(loss.dtype)
    return summed.sum() / (tokens.clamp(min=1) / world_size() * (accumulation / per_generation))
