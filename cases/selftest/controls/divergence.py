"""Controls of family `divergence`: correct losses with other algorithms, each with its true recipe, cut into steps.

A mutant exchanges one step for one that is wrong.
"""

import dataclasses
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch.nn.functional import linear

from parity.case.inputs import Inputs
from parity.families.divergence import LARGEST_LOG_MASS
from parity.families.head import IGNORE_INDEX
from parity.implementations import plain
from parity.implementations.implementation import Outputs
from parity.implementations.limits import require
from parity.judge.recipe import Recipe

BLOCK = 5
Pair = tuple[torch.Tensor, torch.Tensor]
Width = Literal["wide", "stored", "narrow"]
Measure = Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
Model = SimpleNamespace
"""A head (hidden, weight, bias) and what its logits go through: scale, softcap, temperature."""


def student(x: Inputs) -> Model:
    s = x.settings
    head = SimpleNamespace(hidden=x.hidden, weight=x.weight, bias=x.bias)
    return Model(head=head, scale=s.logit_scale, softcap=s.softcap, temperature=s.temperature)


def teacher(x: Inputs) -> Model:
    """Without the rows that pad its head."""
    s = x.settings
    bias = None if x.teacher_bias is None else x.teacher_bias[: s.V]
    weight = None if x.teacher_weight is None else x.teacher_weight[: s.V]
    head = SimpleNamespace(hidden=x.teacher_hidden, weight=weight, bias=bias)
    return Model(head=head, scale=s.teacher_logit_scale, softcap=s.teacher_softcap, temperature=s.temperature)


def logits(m: Model, width: Width) -> torch.Tensor:
    """softcap(scale·(h Wᵀ + b))/τ, (B·T, V): in float32, or stored in the dtype of the head, at first or throughout."""
    hidden, weight, bias = m.head.hidden.flatten(0, 1), m.head.weight, m.head.bias
    if width == "wide":
        z = linear(hidden.float(), weight.float(), None if bias is None else bias.float()).float()
    else:
        z = linear(hidden.to(weight.dtype), weight, bias)
    z = (z if width == "narrow" else z.float()) * m.scale
    return (z if m.softcap is None else m.softcap * torch.tanh(z / m.softcap)) / m.temperature


def rows(x: Inputs) -> torch.Tensor:
    """The label positions, (B·T,)."""
    return x.ids.flatten() != IGNORE_INDEX


def supported(x: Inputs, lp: torch.Tensor) -> Pair:
    """Log-probs of the tokens that a sparse teacher names, -inf where it names fewer."""
    lq, ids = x.support_logps.flatten(0, 1)[rows(x)], x.support_ids.flatten(0, 1)[rows(x)]
    return lp.gather(-1, ids).masked_fill(lq == -torch.inf, -torch.inf), lq


def completed(x: Inputs, lp: torch.Tensor, lq: torch.Tensor) -> Pair:
    """Both completed by a tail bucket, or renormalised."""
    mass = [torch.logsumexp(logps, -1, keepdim=True) for logps in (lp, lq)]
    if not x.settings.tail:
        return lp - mass[0], lq - mass[1]
    return torch.cat([lp, tail(mass[0])], -1), torch.cat([lq, tail(mass[1])], -1)


def by_torch(z: torch.Tensor) -> torch.Tensor:
    """torch's log-softmax over the vocabulary; wrong in float16 beyond 65,504 tokens (`torch-log-softmax-fp16-divergence`)."""
    fits = z.dtype != torch.float16 or z.shape[-1] < 65504
    require(fits, "torch sums the exponentials of a float16 softmax in float16 on the CPU")
    return torch.log_softmax(z, -1)


def tail(mass: torch.Tensor) -> torch.Tensor:
    """log(1 - e^mass)."""
    return torch.log(-torch.expm1(mass.clamp(max=LARGEST_LOG_MASS)))


def _weighted(lp: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """p (log p - other), 0 where p is 0; a log-prob beyond the range of its dtype shows as an infinite loss."""
    p = lp.exp()
    return torch.where(p != 0, p, 0.0) * torch.where(p != 0, lp - other, 0.0)  # a NaN shows


def by_log_mixture(lp: torch.Tensor, lq: torch.Tensor, beta: float) -> torch.Tensor:
    """The definition in log space, per token."""
    if beta == 0.0:
        return _weighted(lq, lp).sum(-1)
    if beta == 1.0:
        return _weighted(lp, lq).sum(-1)
    # not logaddexp: its backward divides by 1 + exp(b - a), which is infinite in float16 from e^11 on
    finite = [x.clamp(min=torch.finfo(x.dtype).min) for x in (lp, lq)]  # both may be -inf, where nothing is weighted
    m = torch.stack([finite[0] + math.log(1 - beta), finite[1] + math.log(beta)]).logsumexp(0)
    # the weight comes last: beta times a probability of two quanta of float16 is two quanta again
    return (beta * _weighted(lq, m) + (1 - beta) * _weighted(lp, m)).sum(-1)


class _ForwardKL(torch.autograd.Function):
    """Σ q (log q - log p) per token, as a kernel: the gradient -q takes the teacher's dtype."""

    @staticmethod
    def forward(ctx, lp: torch.Tensor, lq: torch.Tensor) -> torch.Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(lq)
        return _weighted(lq.float(), lp.float()).sum(-1)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[no-untyped-def]
        (lq,) = ctx.saved_tensors
        return -(lq.exp() * grad.to(lq.dtype).unsqueeze(-1)), None


def by_kernel(lp: torch.Tensor, lq: torch.Tensor, beta: float) -> torch.Tensor:
    """The forward KL by a kernel; the others have none."""
    return _ForwardKL.apply(lp, lq) if beta == 0.0 else by_log_mixture(lp, lq, beta)


def by_blocks(lp: torch.Tensor, lq: torch.Tensor, beta: float) -> torch.Tensor:
    """Per block of the vocabulary, from the last to the first."""
    parts = zip(lp.split(BLOCK, -1), lq.split(BLOCK, -1), strict=True)
    total = lp.new_zeros(lp.shape[0])
    for a, b in reversed(list(parts)):
        total = total + by_log_mixture(a, b, beta)
    return total


def count(x: Inputs) -> torch.Tensor:
    """num_items_in_batch, or the number of label positions."""
    return rows(x).sum().clamp(min=1) if x.num_items_in_batch is None else x.num_items_in_batch


def divided(x: Inputs, per_token: torch.Tensor) -> torch.Tensor:
    """Sum over the label positions ÷ `count`."""
    return per_token.sum() / count(x)


@dataclasses.dataclass(frozen=True)
class Steps:
    """The steps in order: inputs, both models, log-probs of the label positions, support, measure, normaliser, loss.

    `width`: float32 throughout, from the stored logits on, or nowhere: the dtype of each head down to its terms.
    """

    width: Width = "wide"
    read: Callable[[Inputs], Inputs] = lambda x: x
    student: Callable[[Inputs], Model] = student
    teacher: Callable[[Inputs], Model] = teacher
    rows: Callable[[Inputs], torch.Tensor] = rows
    log_softmax: Callable[[torch.Tensor], torch.Tensor] = by_torch
    supported: Callable[[Inputs, torch.Tensor], Pair] = supported
    completed: Callable[[Inputs, torch.Tensor, torch.Tensor], Pair] = completed
    measure: Measure = by_log_mixture
    divided: Callable[[Inputs, torch.Tensor], torch.Tensor] = divided
    loss: Callable[[Inputs, torch.Tensor], torch.Tensor] = lambda x, loss: loss

    def __call__(self, x: Inputs) -> Outputs:
        """As an adapter of family `divergence`."""
        x = self.read(x)
        per_token = self.measure(*self._pair(x), x.settings.beta).float()
        return {"loss": self.loss(x, self.divided(x, per_token))}

    def _pair(self, x: Inputs) -> Pair:
        """Student's and teacher's log-probs of the label positions, over the vocabulary or the completed support."""
        lp = self.log_softmax(logits(self.student(x), self.width))[self.rows(x)]
        if x.settings.sparse != "none":
            return self.completed(x, *self.supported(x, lp))
        return lp, self.log_softmax(self._teacher_logits(x))[self.rows(x), : x.settings.V]

    @torch.no_grad()
    def _teacher_logits(self, x: Inputs) -> torch.Tensor:
        model = self.teacher(x)
        if x.teacher_logits is None:
            return logits(model, self.width)
        z = x.teacher_logits.flatten(0, 1)[:, : x.settings.V]
        return (z if self.width == "narrow" else z.float()) / model.temperature

    def recipe(self, x: Inputs) -> Recipe:
        """float32; logits stored in the dtype of their head; or everything in it, the teacher's in its own."""
        if self.width == "wide":
            return Recipe()
        dtype, teacher = plain.head_dtype(x), None if x.settings.sparse != "none" else "input"
        stored = Recipe(logits=dtype, dlogits=dtype, teacher=teacher)
        if self.width == "stored":
            return stored
        narrow: dict[str, Any] = dict.fromkeys(("elementwise", "softmax"), dtype)
        narrow |= dict.fromkeys(("teacher_softmax", "teacher_elementwise"), teacher)
        kernel = self.measure is by_kernel and x.settings.beta == 0.0
        return dataclasses.replace(stored, **narrow, log_probs=teacher if kernel else None)


def by_maximum(z: torch.Tensor) -> torch.Tensor:
    """z - m - log Σ exp(z - m) by autograd, through the maximum m too."""
    m = z.max(-1, keepdim=True).values
    return z - (m + (z - m).exp().sum(-1, keepdim=True).log())


ROADS = {
    "ieee": Steps(),
    "stored": Steps("stored", divided=lambda x, per_token: (per_token / count(x)).sum()),
    "maximum": Steps(log_softmax=by_maximum),
    "blocks": Steps("stored", measure=by_blocks),
    "narrow": Steps("narrow", divided=lambda x, per_token: (per_token / count(x)).sum()),
    "kernel": Steps("narrow", measure=by_kernel),
}
