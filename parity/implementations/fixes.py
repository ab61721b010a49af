"""Our own corrected implementations, judged like any other and with no ledger entry of their own."""

import functools
from typing import Any

import torch

from parity.case.inputs import Inputs
from parity.families.head import IGNORE_INDEX
from parity.families.policy_losses import OF_LOSS, epsilon_high
from parity.implementations import plain
from parity.implementations.implementation import EVERY_CONTEXT, Outputs, implementation
from parity.implementations.limits import ONE_WEIGHT
from parity.implementations.trl_trainer import METRICS
from parity.judge.recipe import Recipe

KEPT: dict[str, Any] = {"memory_budget": 2**40}
"""Room for every logit."""


def _chunked(x: Inputs) -> Recipe:
    """float32 throughout, gradients too; on CUDA that of 16-bit logits is rounded to their dtype for its products."""
    dlogits = x.product_dtype if x.hidden.is_cuda else "fp32"
    return Recipe(dlogits=dlogits, dinputs="fp32" if x.autocast else None)


def _log_probs(x: Inputs, memory_budget: int | None = None) -> Outputs:
    """`parity.fixes.selective_log_probs`."""
    from parity.fixes import selective_log_probs as function

    s = x.settings
    options = {name: getattr(s, name) for name in ("temperature", "softcap", "logit_scale", "chunk_size")}
    options |= {"ignore_index": IGNORE_INDEX, "memory_budget": memory_budget, "entropy": s.entropy != "none"}
    found = function(x.hidden, x.weight, x.ids, bias=x.bias, **options)
    return {"logps": found[0], "entropy": found[1]} if isinstance(found, tuple) else {"logps": found}


LOG_PROBS: dict[str, Any] = {
    "family": "logprobs",
    "recipe": _chunked,
    "wide": True,
    "outputs": frozenset({"entropy"}),
    "contexts": EVERY_CONTEXT,
    "sources": ("parity.fixes.selective_log_probs",),
}
implementation("fixes.selective_log_probs", **LOG_PROBS)(_log_probs)
implementation("fixes.selective_log_probs.kept", every=4, **LOG_PROBS)(functools.partial(_log_probs, **KEPT))


@torch.compiler.disable  # built before training is compiled, as by a user
def _built(x: Inputs, **kwargs: Any) -> torch.nn.Module:
    from parity.fixes import FusedLinearGRPOLoss

    s = x.settings
    loss = FusedLinearGRPOLoss(
        beta=s.beta,
        compiled=False,
        use_ref_model=s.beta != 0.0,
        chunk_size=None if s.chunk_size == 1 else s.chunk_size,  # 1 is Liger's default; None, what suits, is ours
        epsilon_low=s.epsilon,
        epsilon_high=epsilon_high(s),
        top_entropy_quantile=1.0 if x.top_entropy_quantile is None else float(x.top_entropy_quantile),
        current_gradient_accumulation_steps=s.accumulation,
        **{name: getattr(s, name) for name in (*OF_LOSS, "softcap", "logit_scale")},
        **kwargs,
    )
    return loss.train(s.mode == "train")


def _policy_loss(x: Inputs, **kwargs: Any) -> Outputs:
    """`parity.fixes.FusedLinearGRPOLoss`."""
    loss = _built(x, **kwargs)
    given = {"num_items_in_batch": x.num_items_in_batch, "vllm_is_ratio": x.importance_sampling_ratio}
    given |= {f"{name}_per_token_logps": x.tensors[f"{name}_logps"] for name in ("ref", "old", "sampling")}
    out, metrics = loss(plain.states(x), x.weight, x.ids, x.mask, x.advantages, x.bias, **given)
    told = {name: next((metrics[k] for k in keys if k in metrics), None) for name, keys in METRICS.items()}
    return {"loss": out} | {name: value.detach().float() for name, value in told.items() if value is not None}


POLICY: dict[str, Any] = {
    "family": "policy",
    "recipe": _chunked,
    "wide": True,
    "outputs": frozenset(METRICS),
    "contexts": EVERY_CONTEXT,
    "limits": (ONE_WEIGHT,),
    "sources": ("parity.fixes.grpo.FusedLinearGRPOLoss.forward",),
}
implementation("fixes.FusedLinearGRPOLoss", **POLICY)(_policy_loss)
implementation("fixes.FusedLinearGRPOLoss.kept", every=4, **POLICY)(functools.partial(_policy_loss, **KEPT))
