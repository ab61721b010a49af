"""Recipes: the precision in which an implementation multiplies, stores and accumulates, as it declares it."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
TF32, TF32_TRUNCATED = "tf32", "tf32-truncated"
UNIT_ROUNDOFF = {"fp64": 2.0**-53, "fp32": 2.0**-24, "fp16": 2.0**-11, "bf16": 2.0**-8}
NARROW = 2.0**-20
"""Unit roundoffs above it round on a grid (`MonteCarlo._grid`), those below by independent noise."""
HALF_SUBNORMAL = {
    name: torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps / 2 or math.ulp(0.0)
    for name, dtype in DTYPES.items()
}
"""Half the spacing of subnormals; for float64, where no number is that small, the spacing: units are divided by."""
LARGEST = {name: torch.finfo(dtype).max for name, dtype in DTYPES.items()}


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The precision in which an implementation computes; "input" means the dtype of the case.

    Attributes:
        matmul: precision in which forward products are multiplied: "ieee", "tf32" (operands rounded to its grid) or
            "tf32-truncated" (cut to it); which of the two a device does is probed, see `parity.judge.products`.
        matmul_backward: the same for the backward products.
        logits: dtype in which logits (or a tile of them) are stored.
        dlogits: dtype in which the gradient of the logits is stored.
        folded: factor on the parameters instead of on the logits (1/τ on the hidden states): logits are stored with it and
            their gradient without, which flushes to 0 sooner by that factor.
        teacher: dtype in which a teacher's logits are stored, where it is not that of `logits`, or None.
        teacher_softmax: dtype in which the operations from a teacher's logits to its log-probs round, its log-softmax
            included, where it is not that of `elementwise` and `softmax`, or None.
        teacher_elementwise: dtype in which elementwise operations on a teacher's log-probs alone round their result,
            where it is not that of `elementwise`, or None.
        log_probs: dtype in which a kernel stores the gradient of the log-probs it was given, where it is not that of
            `softmax`, or None.
        bias: dtype in which a bias is used, its sum with the logits is held and their gradient is summed for it, where it
            is not that of `inputs`, `logits` and `dlogits`, or None.
        elementwise: dtype in which every elementwise operation rounds its result.
        softmax: dtype of the log-softmax over the vocabulary, as stored and as read again by its backward.
        log_sum: dtype to which a log-softmax rounds its sum of exponentials and their logarithm on the way, where it is not
            that of the softmax: torch's CPU kernels do so, its CUDA kernels keep float32 (SoftMax.cu).
        log_sum_exp: dtype in which the log-sum-exp is stored where log-probs are z - logsumexp(z), "fp32" or None where it is
            kept in float32 or the largest logit is subtracted first, as torch's log_softmax does.
        accumulate: dtype in which partial gradients are summed across chunks.
        partials: how many partial gradients are summed so (the roundings grow with its square root).
        partial_terms: how many terms each of them sums, where they are added one by one into a sum of that dtype in memory,
            in any order; 0 where only their number is known. A partial sum below half a unit of the total is lost.
        reduction: dtype in which the parts of a product that is split along a long sum are added, "fp32" unless a device
            was found to round them (`torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction` and its twin).
        upstream: factor, at most 1, that gradients meet last of all, where the forward pass took them: in float16 they overflow
            sooner, and do not underflow by it.
        cotangent: dtype to which a loss's upstream gradient is rounded before it multiplies gradients that the forward pass
            took: on CUDA torch takes a factor of no dimensions in the dtype of the other.
        inputs: dtype to which the parameters are cast before use (autocast), or None.
        dinputs: dtype in which their gradient passes that cast, where it is not that of `inputs`, or None.
        tanh: "ieee", or "sigmoid" for 2σ(2x) - 1, whose error is absolute near zero.
        entropy: "shifted", or "unshifted" where an entropy is L - Σ p·z with p = exp(z - L) of logits whose largest is not
            subtracted first: the rounding u·|L| of the log-sum-exp L is in every p, and u·L² in the entropy.
        selected: dtype to which the products h·W[id] of the selected logit are rounded one by one, where an
            implementation computes it apart from the logits of the log-sum-exp.
        kept: dtype in which `stored(x)` keeps a value of a definition, or None: that of the inputs.
        output: dtype of values returned, "fp32" or "input", or "any"; gradients have the dtype of their tensor.
    """

    matmul: str = "ieee"
    matmul_backward: str = "ieee"
    logits: str = "fp32"
    dlogits: str = "fp32"
    folded: float = 1.0
    teacher: str | None = None
    teacher_softmax: str | None = None
    teacher_elementwise: str | None = None
    log_probs: str | None = None
    bias: str | None = None
    elementwise: str = "fp32"
    softmax: str = "fp32"
    log_sum: str | None = None
    log_sum_exp: str | None = None
    accumulate: str = "fp32"
    partials: int = 1
    partial_terms: int = 0
    reduction: str = "fp32"
    upstream: float = 1.0
    cotangent: str = "fp32"
    inputs: str | None = None
    dinputs: str | None = None
    tanh: str = "ieee"
    entropy: str = "shifted"
    selected: str = "fp32"
    kept: str | None = None
    output: str = "fp32"

    def resolve(self, dtype: str) -> Recipe:
        """The recipe with "input" replaced by `dtype`: recipes that coincide for a dtype share their replicas."""
        named: dict[str, Any] = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        changes: dict[str, Any] = {k: dtype for k, v in named.items() if v == "input"}
        out = dataclasses.replace(self, **changes)
        out = dataclasses.replace(
            out,
            teacher=_other(out.teacher, out.logits),
            teacher_softmax=_other(out.teacher_softmax, out.elementwise, out.softmax),
            teacher_elementwise=_other(out.teacher_elementwise, out.elementwise),
            log_probs=_other(out.log_probs, out.softmax),
            log_sum=_other(out.log_sum, out.softmax, *(() if out.teacher_softmax is None else (out.teacher_softmax,))),
            log_sum_exp=_other(out.log_sum_exp, "fp32"),
            dinputs=_other(out.dinputs, out.inputs),
            bias=_other(out.bias, out.inputs or "fp32", out.logits, out.dlogits),
        )
        if out.accumulate == "fp32":
            out = dataclasses.replace(out, partials=1, partial_terms=0)
        return out if "fp16" in dataclasses.astuple(out) else dataclasses.replace(out, upstream=1.0)

    def stored_wide(self) -> Recipe:
        """The recipe with float32 wherever something is stored, cast or rounded."""
        return Recipe(
            self.matmul, self.matmul_backward, tanh=self.tanh, entropy=self.entropy, kept="fp32", output=self.output
        )

    @property
    def stores_narrow(self) -> bool:
        """Whether anything that a family's definition stores is narrower than float32."""
        return dataclasses.replace(self, kept="fp32") != self.stored_wide()

    def describe(self) -> str:
        """The fields away from their default, for a result row: "logits=bf16 dlogits=bf16", or "fp32"."""
        parts = [
            f"{f.name}={getattr(self, f.name)}"
            for f in dataclasses.fields(self)
            if getattr(self, f.name) != f.default and f.name not in ("folded", "partials", "partial_terms", "upstream")
        ]
        return " ".join(parts) or "fp32"


def _other(dtype: str | None, *like: str | None) -> str | None:
    """`dtype`, or None where it is the same as each of `like`."""
    return None if all(dtype == name for name in like) else dtype


IEEE_FP32 = Recipe()
EAGER = Recipe(logits="input", dlogits="input", elementwise="input", softmax="input", inputs="input", output="input")
"""Plain torch on 16-bit tensors: every operation rounds its result to the dtype of the inputs."""
