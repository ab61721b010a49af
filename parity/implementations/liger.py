"""Liger's log-probs: chunked selective log-prob, fused linear cross entropy, cross entropy. Its GRPO losses: liger_grpo.py."""

import functools
import math
from typing import Any

import torch

from parity.case.inputs import Inputs
from parity.families.head import IGNORE_INDEX
from parity.implementations import plain
from parity.implementations.cce import FOLDED
from parity.implementations.implementation import EVERY_CONTEXT, KERNEL, Outputs, by_token, implementation
from parity.implementations.limits import ONE_DTYPE, accepted, fitting, found_at, only, taking
from parity.implementations.reduced import ONE_BY_ONE, class_weights, each_reduced, one_by_one
from parity.judge.recipe import Recipe

offer = functools.partial(implementation, family="logprobs", library="liger-kernel")
"""The decorator of this file."""
NO_SOFTCAP = only("no softcap parameter", lambda s: s.softcap is None)
UNBIASED = only(
    "scale or temperature with a bias: scaling the hidden states leaves the bias out",
    lambda s: s.logit_scale == s.temperature or s.bias == "none",
)
NO_SCALE = only("no logit-scale parameter", lambda s: s.logit_scale == 1.0)
SMALL_HEADS = only(
    "a kernel multiplies each row of the head for each position, which takes Triton's interpreter long: at most 4,096 in all",
    lambda s: s.device != "cpu" or s.B * s.T * s.V <= 1 << 12,
)
LOG_PROBS = "liger_kernel.chunked_loss.fused_linear_ppo:_ChunkedSelectiveLogProbFunction"
LINEAR_LOSS = "liger_kernel.transformers.fused_linear_cross_entropy:LigerFusedLinearCrossEntropyLoss"
SCALED_LOSS = "liger_kernel.ops.fused_linear_scaled_cross_entropy:LigerFusedLinearScaledCrossEntropyFunction"
LOSS = "liger_kernel.transformers.cross_entropy:LigerCrossEntropyLoss"
SOURCE = "liger_kernel.ops.cross_entropy.LigerCrossEntropyFunction"


def chunked(x: Inputs, **more: Any) -> Recipe:
    """Tiles of logits in the dtype of the hidden states, to which the head is cast; from there float32, in which the bias
    is added and the gradient of the head is summed. Before 0.8 autograd goes through whole logits of the head's dtype,
    which bias and temperature round to again."""
    if not streams_vocabulary():
        return plain.stored(x, folded=plain.factor(x), **more)
    return Recipe(logits="input", bias="fp32", **plain.cast_head(x), **more)


def streams_vocabulary() -> bool:
    """Whether the installed release's GRPO loss never holds all logits of a token, as since 0.8; 0.5.5 has no such module."""
    return found_at(LOG_PROBS) is not None


def _fused(x: Inputs) -> Recipe:
    """Chunks of logits overwritten by their gradient, partial head gradients summed in the dtype of the head."""
    s = x.settings
    chunks = math.ceil(s.V / s.H) if s.H else 1
    factor = plain.factor(x)
    return Recipe(
        logits="input",
        dlogits="input",
        folded=factor,
        accumulate="input",
        partials=2 * min(chunks, s.B * s.T) + 2,
        inputs=None if factor == 1.0 and x.weight.dtype == x.hidden.dtype else "input",
    )


@offer(
    "liger.chunked_selective_logprob",
    recipe=chunked,
    contexts=EVERY_CONTEXT,
    sources=("liger_kernel.chunked_loss.fused_linear_ppo._ChunkedSelectiveLogProbFunction",),
    limits=(NO_SOFTCAP, NO_SCALE, only("no ignore_index", lambda s: s.ignored == "none")),
)
def chunked_selective_logprob(x: Inputs) -> Outputs:
    """`_ChunkedSelectiveLogProbFunction`, the log-probs inside Liger's fused GRPO loss."""
    s = x.settings
    logps = accepted(LOG_PROBS).apply(
        x.hidden.flatten(0, 1), x.weight, x.ids.flatten().long(), x.bias, s.temperature, s.chunk_size or 4096
    )
    return {"logps": by_token(logps, x)}


def _added(s: Any) -> dict[str, tuple[Any, Any]]:
    """What both cross entropies add to a log-prob."""
    return {"label_smoothing": (s.smoothing, 0.0), "lse_square_scale": (s.z_loss, 0.0)}


ADDED: dict[str, Any] = KERNEL | {
    "around": functools.partial(plain.libdevice, "liger_kernel.ops.cross_entropy", tanh="tanh"),
    "takes": frozenset({"smoothing", "z_loss"}),
}
LINEAR: dict[str, Any] = ADDED | {
    "recipe": _fused,
    "sources": ("liger_kernel.ops.fused_linear_cross_entropy.LigerFusedLinearCrossEntropyFunction",),
    "limits": (
        ONE_DTYPE,
        fitting(LINEAR_LOSS, lambda s: {"softcap": (s.softcap, None), **_added(s)}),
        FOLDED,
        UNBIASED,
    ),
}


def _linear(x: Inputs, reduction: str, weights: torch.Tensor | None = None) -> Any:
    """`LigerFusedLinearCrossEntropyLoss`, as a function of rows (N, H) and labels (N,); with weights of classes it sums the
    head's gradient in float32 too."""
    kind, wide = accepted(LINEAR_LOSS), None if weights is None else torch.float32
    options = taking(kind, {"softcap": (x.settings.softcap, None), **_added(x.settings)})
    options |= taking(kind, {"ce_weight": (weights, weights), "accum_dtype": (wide, wide)})
    loss = kind(reduction=reduction, ignore_index=IGNORE_INDEX, **options)
    return lambda rows, ids: loss(x.weight, rows, ids, x.bias)


@offer("liger.fused_linear_cross_entropy", **LINEAR)
def fused_linear_cross_entropy(x: Inputs) -> Outputs:
    """Minus `LigerFusedLinearCrossEntropyLoss(reduction="none")`."""
    return {"logps": by_token(-_linear(x, "none")(plain.folded(x).flatten(0, 1), x.ids.flatten().long()), x)}


@offer(
    "liger.fused_linear_cross_entropy.mean",
    **LINEAR
    | {"recipe": lambda x: one_by_one(_fused(x), x, "mean"), "limits": (*LINEAR["limits"], ONE_BY_ONE, SMALL_HEADS)},
)
def mean_cross_entropy(x: Inputs) -> Outputs:
    """Minus `LigerFusedLinearCrossEntropyLoss(reduction="mean")` of a position's label and ignored ones, for each in turn."""
    return each_reduced(x, _linear(x, "mean", class_weights(x)), "mean")


def _scaled(x: Inputs) -> Recipe:
    """Logits in the dtype of the hidden states, which a temperature rounds to again, and so their gradient; else float32.
    The head's gradient is summed in its dtype over chunks of 512 tokens."""
    s = x.settings
    elementwise = "fp32" if s.temperature == 1.0 else "input"
    partials = math.ceil(s.B * s.T / 512)
    return Recipe(
        logits="input", dlogits="input", elementwise=elementwise, accumulate="input", partials=partials, output="any"
    )


@offer(
    "liger.fused_linear_scaled_cross_entropy",
    recipe=_scaled,
    contexts=frozenset({"plain", "checkpoint"}),  # autocast rounds its entropy to 16 bits in a float32 tensor
    outputs=frozenset({"entropy"}),
    sources=("liger_kernel.ops.fused_linear_scaled_cross_entropy._FusedLinearPPOFallbackFunction",),
    limits=(
        ONE_DTYPE,
        NO_SOFTCAP,
        NO_SCALE,
        only("no bias", lambda s: s.bias == "none"),
        only(
            "its kernel for Hopper needs nvidia-cutlass-dsl", lambda s: s.device == "cpu" or plain.installed("cutlass")
        ),
    ),
)
def scaled_cross_entropy(x: Inputs) -> Outputs:
    """`LigerFusedLinearScaledCrossEntropyFunction`, log-probs and entropy for PPO: a CuTe kernel on Hopper, else plain torch."""
    s, function = x.settings, accepted(SCALED_LOSS)
    given = x.hidden.flatten(0, 1), x.weight, x.ids.flatten().long(), float(s.temperature), IGNORE_INDEX, 1
    if s.entropy == "none":
        return {"logps": by_token(-function.apply(*given), x)}
    loss, entropy = function.apply(*given, True)
    return {"logps": by_token(-loss, x), "entropy": by_token(entropy, x)}


@offer(
    "liger.cross_entropy",
    recipe=lambda x: plain.stored(x, "output"),
    sources=(SOURCE,),
    limits=(fitting(LOSS, _added),),
    **ADDED,
)
def cross_entropy(x: Inputs) -> Outputs:
    """Minus `LigerCrossEntropyLoss(reduction="none")` on materialised logits; the temperature divides them. Where there is
    none the loss applies the softcap in every second case."""
    s = x.settings
    own = s.softcap if s.temperature == 1.0 and x.case.seed % 2 else None
    z = plain.logits(x, capped=own is None).flatten(0, 1)
    if s.temperature != 1.0:
        z = z / s.temperature
    kind = accepted(LOSS)
    loss = kind(reduction="none", ignore_index=IGNORE_INDEX, softcap=own, **taking(kind, _added(s)))
    return {"logps": by_token(-loss(z, x.ids.flatten().long()), x)}
