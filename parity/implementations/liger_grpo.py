"""Liger's GRPO losses as bare kernels: the chunked fused linear loss and the Triton loss on logits."""

from typing import Any

import torch

from parity.case.inputs import Inputs, autocast_of
from parity.families.policy_losses import CLIPPED, WINDOW_NORMALISED, epsilon_high
from parity.implementations import plain
from parity.implementations.implementation import Outputs, implementation
from parity.implementations.liger import NO_SCALE, NO_SOFTCAP, chunked, streams_vocabulary
from parity.implementations.limits import ONE_WEIGHT, Limit, accepted, fitting, known_loss_type, only, refused, taking
from parity.judge.recipe import Recipe

COMMON = (
    only("no off-policy mask parameter", lambda s: s.off_policy_mask_threshold is None),
    only("no entropy-quantile parameter", lambda s: not s.entropy_quantile),
    only("no entropy bonus", lambda s: s.entropy_coef == 0.0),
    only("advantages of shape (B,) only", lambda s: s.advantages not in ("token", "repeated")),
    ONE_WEIGHT,
    only("the division by the accumulation steps is the caller's", lambda s: s.accumulation == 1 or _windowed(s)),
    only(
        "a window other than the generation batch is the caller's",
        lambda s: not _windowed(s) or (s.mode == "train" and s.accumulation == s.steps_per_generation),
    ),
)
"""What neither loss has a parameter for: the trainer around it would have to do it."""
NEEDED = "a release must have it"
"""Default of a parameter that a release must have: its value stands for nothing else."""
ONE_DTYPE_BEFORE_08 = only(
    "hidden states and head of one dtype only before 0.8",
    lambda s: streams_vocabulary() or autocast_of(s) is not None or s.head_dtype == "same" or s.dtype == "fp32",
)
FUSED_LOSS = "liger_kernel.chunked_loss.grpo_loss:LigerFusedLinearGRPOLoss"
KERNEL_LOSS = "liger_kernel.transformers.grpo_loss:triton_grpo_loss"


def _fused(x: Inputs) -> Recipe:
    """The log-probs of `liger.chunked`; head gradients of the chunks of sequences are summed in the dtype of the head, in
    the forward pass."""
    accumulate = "fp32" if x.weight.dtype == torch.float32 else "input"
    return chunked(x, accumulate=accumulate, partials=x.settings.B, **plain.late(x))


def _windowed(s: Any) -> bool:
    return s.loss_type in WINDOW_NORMALISED


def _token_level(module: str) -> Limit:
    return refused(
        module,
        "Sequence-level importance sampling is not supported",
        lambda s: s.importance_sampling_level == "token" or s.loss_type not in ("cispo", "sapo", "vespo"),
    )


def _options(s: Any) -> dict[str, tuple[Any, Any]]:
    """The numeric settings, under Liger's names. A release without loss types averages over all tokens, as bnpo."""
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
    return wanted


def _tensors(s: Any, ratio: Any = True, items: Any = True) -> dict[str, tuple[Any, Any]]:
    """The optional tensors, or which of them there are."""
    wanted: dict[str, tuple[Any, Any]] = {"vllm_is_ratio": (None if s.ratio == "none" else ratio, None)}
    return wanted | ({"num_items_in_batch": (items, NEEDED)} if _windowed(s) else {})


def _metrics(x: Inputs, metrics: Any) -> Outputs:
    """[kl, clip ratio] where there is a KL, else [clip ratio]."""
    found = list(metrics)
    out = {"kl": found.pop(0)} if x.settings.beta != 0.0 else {}
    if x.settings.loss_type in (*CLIPPED, "cispo"):
        out["clip_ratio"] = found[0]
    return out


def _fused_loss(x: Inputs, compiled: bool = False) -> Outputs:
    kind, s = accepted(FUSED_LOSS), x.settings
    loss = kind(
        compiled=compiled,
        use_ref_model=s.beta != 0.0,
        chunk_size=s.chunk_size,
        epsilon_low=s.epsilon,
        epsilon_high=epsilon_high(s),
        temperature=s.temperature,
        **taking(kind, _options(s)),
    )
    given = taking(kind.forward, _tensors(s, x.importance_sampling_ratio, x.num_items_in_batch))
    given |= {"ref_per_token_logps": x.ref_logps, "old_per_token_logps": x.old_logps}
    out, metrics = loss(plain.states(x), x.weight, x.ids.long(), x.mask, x.advantages, x.bias, **given)
    return {"loss": out} | _metrics(x, metrics)


FUSED_REJECTS = tuple(limit("liger_kernel.chunked_loss.grpo_loss") for limit in (_token_level, known_loss_type))
FUSED: dict[str, Any] = {
    "family": "policy",
    "library": "liger-kernel",
    "recipe": _fused,
    "outputs": frozenset({"kl", "clip_ratio"}),
    "sources": (
        "liger_kernel.chunked_loss.grpo_loss.LigerFusedLinearGRPOLoss",
        "liger_kernel.chunked_loss.grpo_loss.LigerFusedLinearGRPOFunction.ppo_loss_fn",
    ),
    "limits": (
        fitting(f"{FUSED_LOSS}.forward", lambda s: {"selected_token_ids": ("advantages, not rewards", NEEDED)}),
        *COMMON,
        NO_SOFTCAP,
        NO_SCALE,
        ONE_DTYPE_BEFORE_08,
        fitting(FUSED_LOSS, _options),
        fitting(f"{FUSED_LOSS}.forward", _tensors),
    ),
    "rejects": FUSED_REJECTS,
}


implementation("liger.FusedLinearGRPOLoss", contexts=frozenset({"plain", "autocast", "checkpoint"}), **FUSED)(
    _fused_loss
)
_compiled_for: list[Any] = []
"""The settings of the last case that was compiled."""


@implementation("liger.FusedLinearGRPOLoss.compiled", opt_in=True, every=20, **FUSED)
def fused_compiled(x: Inputs) -> Outputs:
    """`LigerFusedLinearGRPOLoss(compiled=True)`, its default; the first call of a shape compiles for seconds. Programs of
    other settings are dropped, so that a verdict depends on its case alone: where the batch has grown since the call
    before, torch 2.13 crashes."""
    if _compiled_for[:] != [x.settings]:
        torch.compiler.reset()
        _compiled_for[:] = [x.settings]
    return _fused_loss(x, compiled=True)


TRITON: dict[str, Any] = {
    "family": "policy",
    "library": "liger-kernel",
    "recipe": plain.stored,
    "interpreted": True,
    "every": 4,
    "sources": ("liger_kernel.ops.grpo_loss.GrpoLossFunction",),
    "limits": (*COMMON, fitting(KERNEL_LOSS, _options), fitting(KERNEL_LOSS, _tensors)),
    "rejects": (
        _token_level("liger_kernel.ops.grpo_loss"),
        known_loss_type("liger_kernel.ops.grpo_loss", "Unknown loss_type"),
        refused(
            "liger_kernel.ops.grpo_loss",
            "completion_ids.is_contiguous()",
            lambda s: s.layouts in ("contiguous", "flat"),
        ),
    ),
}
MEANS = ("grpo", "bnpo", "dr_grpo")
"""Loss types whose mean needs nothing but the mask."""
CALLERS = only(f"its caller takes the mean of {', '.join(MEANS)}", lambda s: s.loss_type in MEANS)


def _triton(x: Inputs, **reduces: Any) -> Any:
    """`triton_grpo_loss(inplace=False)` on materialised logits, which have one position more."""
    function, s = accepted(KERNEL_LOSS), x.settings
    z = plain.logits(x)
    z = torch.cat([z, torch.zeros_like(z[:, :1])], 1)
    tensors = _tensors(s, x.importance_sampling_ratio, x.num_items_in_batch)
    options = taking(function, _options(s) | tensors | reduces)
    options |= {"temperature": s.temperature, "inplace": False}
    options |= {"eps_low": s.epsilon, "eps_high": epsilon_high(s)}
    return function(z, x.old_logps, x.ref_logps, x.ids.long(), x.advantages, x.mask, **options)


@implementation("liger.triton_grpo_loss", outputs=frozenset({"kl", "clip_ratio"}), **TRITON)
def triton_grpo_loss(x: Inputs) -> Outputs:
    """`triton_grpo_loss(reduce=True)`. A release without `reduce` returns a loss for each token; its caller averages it over
    all of them."""
    out, *metrics = _triton(x, reduce=(True, True))
    if isinstance(metrics[0], list):
        metrics = metrics[0]
    else:
        out, *metrics = ((v * x.mask).sum() / x.mask.sum().clamp(min=1) for v in (out, *metrics) if v is not None)
    return {"loss": out} | _metrics(x, metrics)


@implementation(
    "liger.triton_grpo_loss.unreduced",
    **TRITON | {"limits": (*TRITON["limits"], CALLERS)},
)
def unreduced_triton_grpo_loss(x: Inputs) -> Outputs:
    """`triton_grpo_loss(reduce=False)`, 0 at padding, and the mean of it by the loss type's definition."""
    out, s = _triton(x)[0].float(), x.settings
    counts = x.mask.sum(-1)
    if s.loss_type == "grpo":
        return {"loss": (out.sum(-1) / counts.clamp(min=1)).mean()}
    dr_grpo = s.loss_type == "dr_grpo"
    return {"loss": out.sum() / (len(out) * s.max_completion_length if dr_grpo else counts.sum().clamp(min=1))}
