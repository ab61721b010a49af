"""Liger's GRPO losses as bare kernels: the chunked fused linear loss and the Triton loss on logits."""

import inspect
from typing import Any

import torch

from parity.case.inputs import Inputs
from parity.families.policy import CLIPPED, WINDOW_NORMALISED
from parity.implementations import plain
from parity.implementations.implementation import Outputs, accepted, implementation, require, taking
from parity.implementations.liger import chunked, streams_vocabulary
from parity.judge.recipe import Recipe


def _fused(x: Inputs) -> Recipe:
    """The log-probs of `liger.chunked`; head gradients of the chunks of sequences are summed in the dtype of the head, in
    the forward pass."""
    accumulate = "fp32" if x.weight.dtype == torch.float32 else "input"
    return chunked(x, accumulate=accumulate, partials=x.settings.B, upstream=plain.upstream(x))


def _kernel(x: Inputs) -> Recipe:
    dtype = plain.head_dtype(x)
    return Recipe(logits=dtype, dlogits=dtype, elementwise=dtype)


def _common(x: Inputs) -> None:
    """What neither loss has a parameter for: the trainer around it would have to do it."""
    s = x.settings
    require(s.off_policy_mask_threshold is None, "no off-policy mask parameter")
    require(x.top_entropy_quantile is None, "no entropy-quantile parameter")
    require(s.entropy_coef == 0.0, "no entropy bonus")
    require(x.advantages.dim() == 1, "advantages of shape (B,) only")
    require(s.head != "lora", "a bare kernel takes one weight, no adapter on the head")
    window = s.loss_type in WINDOW_NORMALISED
    require(s.accumulation == 1 or window, "the division by the accumulation steps is the caller's")
    require(
        not window or (s.mode == "train" and s.accumulation == s.steps_per_generation),
        "a window other than the generation batch is the caller's",
    )


def _epsilons(x: Inputs) -> tuple[float, float]:
    s = x.settings
    return s.epsilon, s.epsilon if s.epsilon_high is None else s.epsilon_high


NEEDED = "a release must have it"
"""Default of a parameter that a release must have: its value stands for nothing else."""


def _options(x: Inputs, function: Any) -> dict[str, Any]:
    """The numeric settings, under Liger's names. A release without loss types averages over all tokens, as bnpo."""
    s = x.settings
    length = s.max_completion_length
    wanted: dict[str, tuple[Any, Any]] = {
        "beta": (s.beta, NEEDED),
        "loss_type": (s.loss_type, "bnpo"),
        "max_completion_length": (length, NEEDED if s.loss_type == "dr_grpo" else length),
        "importance_sampling_level": (s.importance_sampling_level, "token"),
        "delta": (s.delta, None),
        "use_bias_correction_kl": (s.use_bias_correction_kl and s.beta != 0.0, False),
    }
    if s.loss_type == "sapo":
        wanted |= {n: (getattr(s, n), NEEDED) for n in ("sapo_temperature_pos", "sapo_temperature_neg")}
    if s.loss_type == "vespo":
        names = ("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg")
        wanted |= {n: (getattr(s, n), NEEDED) for n in names}
    return taking(function, wanted)


def _tensor_options(x: Inputs, function: Any) -> dict[str, Any]:
    wanted: dict[str, tuple[Any, Any]] = {"vllm_is_ratio": (x.importance_sampling_ratio, None)}
    if x.settings.loss_type in WINDOW_NORMALISED:
        wanted["num_items_in_batch"] = (x.num_items_in_batch, NEEDED)
    return taking(function, wanted)


def _metrics(x: Inputs, metrics: Any) -> Outputs:
    """[kl, clip ratio] where there is a KL, else [clip ratio]."""
    found = list(metrics)
    out = {"kl": found.pop(0)} if x.settings.beta != 0.0 else {}
    if x.settings.loss_type in (*CLIPPED, "cispo"):
        out["clip_ratio"] = found[0]
    return out


def _fused_loss(x: Inputs, compiled: bool) -> Outputs:
    import liger_kernel.chunked_loss.grpo_loss as module

    kind = accepted(module, "LigerFusedLinearGRPOLoss")
    known = inspect.signature(kind.forward).parameters
    require("selected_token_ids" in known, "takes rewards, not advantages, in the installed version")
    s = x.settings
    _common(x)
    require(s.softcap is None, "no softcap parameter")
    require(s.logit_scale == 1.0, "no logit-scale parameter")
    one = streams_vocabulary() or s.context == "autocast" or x.weight.dtype == x.hidden.dtype
    require(one, "hidden states and head of one dtype only before 0.8")
    low, high = _epsilons(x)
    loss = kind(
        compiled=compiled,
        use_ref_model=s.beta != 0.0,
        chunk_size=s.chunk_size,
        epsilon_low=low,
        epsilon_high=high,
        temperature=s.temperature,
        **_options(x, kind),
    )
    out, metrics = loss(
        plain.states(x),
        x.weight,
        x.ids.long(),
        x.mask,
        x.advantages,
        x.bias,
        ref_per_token_logps=x.ref_logps,
        old_per_token_logps=x.old_logps,
        **_tensor_options(x, kind.forward),
    )
    return {"loss": out} | _metrics(x, metrics)


FUSED: dict[str, Any] = {
    "family": "policy",
    "role": "candidate",
    "library": "liger-kernel",
    "recipe": _fused,
    "outputs": frozenset({"kl", "clip_ratio"}),
    "sources": ("liger_kernel.chunked_loss.grpo_loss.LigerFusedLinearGRPOFunction.ppo_loss_fn",),
}


@implementation("liger.FusedLinearGRPOLoss", contexts=frozenset({"plain", "autocast", "checkpoint"}), **FUSED)
def fused(x: Inputs) -> Outputs:
    """`LigerFusedLinearGRPOLoss(compiled=False)`."""
    return _fused_loss(x, compiled=False)


_compiled_for: list[Any] = []
"""The settings of the last case that was compiled."""


@implementation("liger.FusedLinearGRPOLoss.compiled", opt_in=True, every=20, **FUSED)
def fused_compiled(x: Inputs) -> Outputs:
    """`LigerFusedLinearGRPOLoss(compiled=True)`, its default; the first call of a shape compiles for seconds.

    Programs of other settings are dropped, so that a verdict depends on its case alone: where the batch has grown since
    the call before, torch 2.13 crashes.
    """
    if _compiled_for[:] != [x.settings]:
        torch.compiler.reset()
        _compiled_for[:] = [x.settings]
    return _fused_loss(x, compiled=True)


@implementation(
    "liger.triton_grpo_loss",
    family="policy",
    role="candidate",
    library="liger-kernel",
    recipe=_kernel,
    outputs=frozenset({"kl", "clip_ratio"}),
    interpreted=True,
    every=4,
    sources=("liger_kernel.ops.grpo_loss.GrpoLossFunction",),
)
def triton_grpo_loss(x: Inputs) -> Outputs:
    """`triton_grpo_loss(reduce=True, inplace=False)` on materialised logits, which have one position more.

    A release without `reduce` returns a loss for each token; its caller averages it over all of them.
    """
    import liger_kernel.transformers.grpo_loss as module

    function = accepted(module, "triton_grpo_loss")
    reduces = taking(function, {"reduce": (True, True)})
    _common(x)
    low, high = _epsilons(x)
    z = plain.logits(x)
    z = torch.cat([z, torch.zeros_like(z[:, :1])], 1)
    options = _options(x, function) | _tensor_options(x, function)
    out, *metrics = function(
        z,
        x.old_logps,
        x.ref_logps,
        x.ids.long(),
        x.advantages,
        x.mask,
        temperature=x.settings.temperature,
        eps_low=low,
        eps_high=high,
        inplace=False,
        **reduces,
        **options,
    )
    if reduces:
        metrics = metrics[0]
    else:
        out, *metrics = ((v * x.mask).sum() / x.mask.sum() for v in (out, *metrics) if v is not None)
    return {"loss": out} | _metrics(x, metrics)
