"""Liger's distillation losses: the chunked fused linear JSD in torch, and the Triton JSD and KL kernels."""

import dataclasses
import functools
import math
from typing import Any

import torch

from parity.case.inputs import Inputs
from parity.families.head import IGNORE_INDEX
from parity.implementations import plain
from parity.implementations.implementation import KERNEL, Outputs, implementation
from parity.implementations.liger import NO_SCALE, NO_SOFTCAP
from parity.implementations.limits import ONE_DTYPE, accepted, fitting, only, require, taking
from parity.implementations.trl_divergence import DENSE, HEADS, ONE_VOCABULARY, teacher_biased, teacher_logits
from parity.judge.recipe import Recipe

offer = functools.partial(implementation, family="divergence", library="liger-kernel")
"""The decorator of this file."""
NORMALISED = only("no normaliser parameter: divides by its own label positions", lambda s: s.num_items == "none")
BARE = (
    *HEADS,
    only("no softcap parameter", lambda s: s.softcap is None and s.teacher_softcap is None),
    only("no logit-scale parameter", lambda s: s.logit_scale == 1.0 and s.teacher_logit_scale == 1.0),
    NORMALISED,
    ONE_DTYPE,
)
"""What none of Liger's fused losses has a parameter for."""
FORWARD = only("forward KL only", lambda s: s.beta == 0.0)
CHUNKED_LOSS = "liger_kernel.chunked_loss.jsd_loss:LigerFusedLinearJSDLoss"
UNBIASED = only("no bias parameter", lambda s: s.bias == "none")


def _labels(x: Inputs) -> torch.Tensor:
    return x.ids.flatten().long()


def _chunks(x: Inputs) -> Recipe:
    """Chunks of logits, log-probs and divergence in the dtype of the inputs, partial gradients summed in it."""
    s = x.settings
    dtype = x.autocast or plain.head_dtype(x)
    chunks = max(1, s.B * s.T // (s.chunk_size or 1024))
    stored: dict[str, Any] = dict.fromkeys(("dlogits", "elementwise", "softmax", "accumulate"), dtype)
    return Recipe(logits="input", partials=chunks, output="fp32", **stored, **plain.late(x))


@offer(
    "liger.LigerFusedLinearJSDLoss",
    recipe=_chunks,
    contexts=frozenset({"plain", "autocast", "checkpoint"}),
    sources=("liger_kernel.chunked_loss.jsd_loss.LigerFusedLinearJSDLoss",),
    takes=frozenset({"hard_loss"}),
    limits=(
        *BARE,
        fitting(
            f"{CHUNKED_LOSS}.forward",
            lambda s: {"student_bias": (s.bias, "none"), "teacher_bias": (teacher_biased(s), False)},
        ),
    ),
)
def fused_linear_jsd_loss(x: Inputs) -> Outputs:
    """`LigerFusedLinearJSDLoss(compiled=False)`: plain torch in chunks of tokens."""
    s = x.settings
    kind, chunk = accepted(CHUNKED_LOSS), s.chunk_size or 1024
    options = taking(kind, {"chunk_size": (chunk, chunk)})
    options |= {"weight_hard_loss": s.hard_loss, "weight_soft_loss": 1 - s.hard_loss}
    options |= {"beta": s.beta, "ignore_index": IGNORE_INDEX, "temperature": s.temperature}
    loss = kind(compiled=False, **options)
    student, teacher = x.hidden.flatten(0, 1), x.teacher_hidden.flatten(0, 1)
    biases = taking(kind.forward, {"student_bias": (x.bias, None), "teacher_bias": (x.teacher_bias, None)})
    return {"loss": loss(student, x.weight, teacher, x.teacher_weight, _labels(x), **biases)}


def _tiles(x: Inputs) -> Recipe:
    """float32 from the projection's output on; the gradient of the logits and its sums in the dtype of the inputs."""
    s = x.settings
    chunks = math.ceil(s.V / s.H)
    partials = min(chunks, s.B * s.T) + 1
    upstream = plain.upstream(x)
    return Recipe(logits="input", dlogits="input", accumulate="input", partials=partials, upstream=upstream)


@offer(
    "liger.fused_linear_jsd",
    recipe=_tiles,
    sources=("liger_kernel.ops.fused_linear_jsd.LigerFusedLinearJSDFunction", "liger_kernel.ops.jsd._jsd_kernel"),
    limits=(*BARE, only("no bias parameter", lambda s: s.bias == "none" and not teacher_biased(s)), ONE_VOCABULARY),
    **KERNEL,
)
def fused_linear_jsd(x: Inputs) -> Outputs:
    """`LigerFusedLinearJSD`, chunks of logits and the Triton JSD kernel."""
    s = x.settings
    kind = accepted("liger_kernel.transformers.fused_linear_jsd:LigerFusedLinearJSD")
    loss = kind(jsd_beta=s.beta, ignore_index=IGNORE_INDEX, temperature=s.temperature)
    student, teacher = x.hidden.flatten(0, 1), x.teacher_hidden.flatten(0, 1)
    return {"loss": loss(student, x.weight, teacher, x.teacher_weight, _labels(x))}


def _log_probs(x: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Student's and teacher's log-probs (B·T, V), as the caller of a kernel on log-probs makes them."""
    s = x.settings
    teacher = torch.log_softmax(teacher_logits(x) / s.temperature, -1).flatten(0, 1)
    return torch.log_softmax(plain.logits(x) / s.temperature, -1).flatten(0, 1), teacher


def _kernel(x: Inputs) -> Recipe:
    """Log-probs in the dtype of each head, float32 inside the kernel, which stores their gradient as they are."""
    teacher = {"teacher": "input", "teacher_softmax": "input"}
    return plain.stored(x, "softmax", **teacher, cotangent=plain.cotangent(x), output="any")


@offer(
    "liger.jsd",
    recipe=_kernel,
    sources=("liger_kernel.ops.jsd.LigerJSDFunction", "liger_kernel.ops.jsd._jsd_kernel"),
    limits=(NORMALISED, *DENSE),
    **KERNEL,
)
def jsd(x: Inputs) -> Outputs:
    """`LigerJSD` on log-probs of materialised logits."""
    kind = accepted("liger_kernel.transformers.jsd:LigerJSD")
    return {"loss": kind(beta=x.settings.beta, ignore_index=IGNORE_INDEX)(*_log_probs(x), _labels(x))}


@offer(
    "liger.kl_div",
    # the gradient of the student's log-probs, -q over the rows, is stored in the dtype of the teacher's
    recipe=lambda x: dataclasses.replace(_kernel(x), log_probs="input"),
    sources=("liger_kernel.ops.kl_div.LigerKLDivLossFunction",),
    limits=(FORWARD, NORMALISED, *DENSE, only("no labels", lambda s: s.ignored != "all")),
    **KERNEL,
)
def kl_div(x: Inputs) -> Outputs:
    """`LigerKLDIVLoss(reduction="batchmean", log_target=True)` on the label positions' log-probs."""
    rows = _labels(x) != IGNORE_INDEX
    require(bool(rows.any()), "no labels: the caller selects the rows, and none is left")
    student, teacher = _log_probs(x)
    kind = accepted("liger_kernel.transformers.kl_div:LigerKLDIVLoss")
    loss = kind(reduction="batchmean", log_target=True)
    return {"loss": loss(student[rows], teacher[rows])}


@offer(
    "liger.fused_linear_kl_div",
    # the teacher's model scales and caps its logits in the dtype of its head
    recipe=lambda x: dataclasses.replace(_tiles(x), teacher_softmax="input"),
    sources=("liger_kernel.ops.fused_linear_kl_div.LigerFusedLinearKLDivFunction",),
    limits=(FORWARD, NORMALISED, *DENSE, NO_SOFTCAP, NO_SCALE, ONE_DTYPE, UNBIASED),
    **KERNEL,
)
def fused_linear_kl_div(x: Inputs) -> Outputs:
    """`LigerFusedLinearKLDivLoss` against the teacher's probabilities in float32."""
    s = x.settings
    target = torch.softmax(teacher_logits(x).float() / s.temperature, -1).flatten(0, 1)
    kind = accepted("liger_kernel.transformers.fused_linear_kl_div:LigerFusedLinearKLDivLoss")
    loss = kind(ignore_index=IGNORE_INDEX, temperature=s.temperature)
    return {"loss": loss(x.hidden.flatten(0, 1), x.weight, target, _labels(x))}
