"""What the loss makes of log-probs, held against its definition: the gradient that reaches each log-prob.

A loss of advantages that cancel is 0 whatever its normaliser; the gradients of its log-probs are not.
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from parity.families.policy_losses import CONFIG_FIELDS, aggregate, losses
from parity.watching.own import unit

OPERATIONS = 64
"""Roundings of the log-probs' dtype, at their full size, that a gradient may be off by."""


def loss_mask(inputs: Any) -> Tensor:
    """Which tokens of the completions are in the loss, (B, T)."""
    mask: Tensor = inputs["completion_mask"]
    return mask * inputs["tool_mask"] if "tool_mask" in inputs else mask


def policy(
    trainer: Any, inputs: Any, logps: Tensor, entropies: Tensor | None
) -> tuple[SimpleNamespace, SimpleNamespace]:
    """Settings and tensors of GRPO's loss as `parity.families.policy_losses.losses` takes them, float64 on the CPU."""
    args = trainer.args
    absent = {"importance_sampling_level": "token", "use_bias_correction_kl": False, "max_completion_length": 1}
    s = SimpleNamespace(**{n: getattr(args, n, absent.get(n)) for n in CONFIG_FIELDS})
    s.beta, s.entropy_coef, s.mode = trainer.beta, 0.0, "train"  # the bonus reaches the entropies alone
    s.accumulation = getattr(trainer, "current_gradient_accumulation_steps", args.gradient_accumulation_steps)
    s.steps_per_generation = getattr(args, "steps_per_generation", None) or args.gradient_accumulation_steps
    if args.loss_type == "dr_grpo":
        s.max_completion_length = trainer.max_completion_length

    def of(name: str) -> Tensor | None:
        value = inputs.get(name)
        return value.detach().double().cpu() if torch.is_tensor(value) else None

    mask = loss_mask(inputs)
    items, quantile = inputs.get("num_items_in_batch"), getattr(args, "top_entropy_quantile", 1.0)
    x = SimpleNamespace(
        mask=mask.cpu(),
        advantages=of("advantages"),
        old_logps=of("old_per_token_logps"),
        ref_logps=of("ref_per_token_logps"),
        sampling_logps=of("sampling_per_token_logps"),
        importance_sampling_ratio=of("importance_sampling_ratio"),
        top_entropy_quantile=None if quantile >= 1 else torch.tensor(quantile),
        num_items_in_batch=float(mask.sum() if items is None else items) / trainer.accelerator.num_processes,
        logps=logps.double().cpu(),
        entropies=None if entropies is None else entropies.double().cpu(),
    )
    return s, x


def slopes(s: SimpleNamespace, x: SimpleNamespace) -> Tensor:
    """∂loss/∂log-prob by the definition, (B, T)."""
    lp = x.logps.clone().requires_grad_()
    with torch.enable_grad():
        loss = losses(s, x, lp, torch.zeros_like(lp) if x.entropies is None else x.entropies)["loss"]
        (found,) = torch.autograd.grad(loss, lp)
    return found


def allowed(s: SimpleNamespace, x: SimpleNamespace, dtype: torch.dtype) -> Tensor:
    """What rounding in the log-probs' dtype may make of each slope, (B, T): of its terms, which may cancel."""
    mask = x.mask.double()
    _, weight = aggregate(s, torch.ones_like(x.logps), mask, x.num_items_in_batch)
    d = torch.zeros_like(x.logps) if x.old_logps is None else (x.logps - x.old_logps) * mask
    if s.importance_sampling_level == "sequence":
        d = d.abs().sum(-1, keepdim=True).expand_as(d) / mask.sum(-1, keepdim=True).clamp(min=1)
    a = (x.advantages if x.advantages.dim() == 2 else x.advantages.unsqueeze(-1)).abs() * d.exp()
    if x.importance_sampling_ratio is not None and s.loss_type != "vespo":
        a = a * x.importance_sampling_ratio.nan_to_num(0.0)
    if s.beta:
        a = a + s.beta * (1 + ((x.ref_logps - x.logps) * mask).exp()) * (d.exp() if s.use_bias_correction_kl else 1)
    return OPERATIONS * unit(dtype) * weight * a * (1 + x.logps.abs() * mask + d.abs()) + 1e-30


def faults(trainer: Any, s: SimpleNamespace, x: SimpleNamespace, found: Tensor, dtype: torch.dtype) -> list[str] | None:
    """What else the slopes `found` (B, T) are, nothing if nothing that is known; None where they are the definition's."""
    exact, bound = slopes(s, x), allowed(s, x, dtype)
    if bool(((found - exact).abs() <= bound).all()):
        return None
    tried: dict[str, Tensor] = {}
    if x.importance_sampling_ratio is not None:
        without = SimpleNamespace(**{**vars(x), "importance_sampling_ratio": None})
        tried["the sampler's importance ratio is not applied"] = slopes(s, without)
    mask = x.mask.double()
    if s.loss_type in ("grpo", "sapo"):
        tried["padding is counted in the normaliser"] = exact * mask.sum(-1, keepdim=True) / mask.shape[1]
    elif s.loss_type == "bnpo":
        tried["padding is counted in the normaliser"] = exact * mask.sum() / mask.numel()
    counts = {
        "micro-batches of an optimizer step": s.accumulation,
        "ranks": trainer.accelerator.num_processes,
        "micro-batches of a generation batch": s.steps_per_generation,
    }
    for name, n in counts.items():
        tried |= {
            f"{n} times too large: not divided by the {name}": exact * n,
            f"{n} times too small: divided by the {name} once too often": exact / n,
        }
    named = []
    for name, other in tried.items():
        wide = bound * max(1.0, float(other.norm() / exact.norm().clamp(min=1e-30)))
        if bool(((found - other).abs() <= wide).all()) and not bool(((other - exact).abs() <= 4 * wide).all()):
            named.append(name)
    return named
