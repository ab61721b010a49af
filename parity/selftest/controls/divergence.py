"""Controls of family `divergence`: correct losses with other algorithms, each with its true recipe."""

import dataclasses
import math
from collections.abc import Callable
from typing import Literal

import torch
from torch.nn.functional import linear

from parity.case.inputs import Inputs
from parity.families.divergence import LARGEST_LOG_MASS
from parity.families.logprobs import IGNORE_INDEX
from parity.implementations import plain
from parity.implementations.implementation import Outputs
from parity.recipe import Recipe

BLOCK = 5
Pair = tuple[torch.Tensor, torch.Tensor]
Width = Literal["wide", "stored", "narrow"]
Measure = Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]


def _finished(z: torch.Tensor, scale: float, softcap: float | None, temperature: float) -> torch.Tensor:
    z = z * scale
    return (z if softcap is None else softcap * torch.tanh(z / softcap)) / temperature


def _logits(x: Inputs, width: Width) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Student's and teacher's z, (B·T, V): in float32, or stored in the dtype of the head, at first or throughout."""
    s = x.settings

    def project(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if width == "wide":
            return linear(hidden.float(), weight.float(), None if bias is None else bias.float()).float()
        z = linear(hidden.to(weight.dtype), weight, bias)
        return z if width == "narrow" else z.float()

    student = _finished(project(x.hidden.flatten(0, 1), x.weight, x.bias), s.logit_scale, s.softcap, s.temperature)
    if s.sparse != "none":
        return student, None
    if x.teacher_logits is not None:
        teacher = x.teacher_logits.flatten(0, 1)[:, : s.V]
        return student, (teacher if width == "narrow" else teacher.float()) / s.temperature
    bias = None if x.teacher_bias is None else x.teacher_bias[: s.V]
    raw = project(x.teacher_hidden.flatten(0, 1), x.teacher_weight[: s.V], bias)
    return student, _finished(raw, s.teacher_logit_scale, s.teacher_softcap, s.temperature)


def _log_probs(x: Inputs, width: Width) -> Pair:
    """Log-probs of the label positions, over the vocabulary or the completed support."""
    student, teacher = _logits(x, width)
    rows = x.ids.flatten() != IGNORE_INDEX
    lp = torch.log_softmax(student, -1)[rows]
    if teacher is not None:
        return lp, torch.log_softmax(teacher, -1)[rows]
    lq, ids = x.support_logps.flatten(0, 1)[rows], x.support_ids.flatten(0, 1)[rows]
    lp = lp.gather(-1, ids).masked_fill(lq == -torch.inf, -torch.inf)
    mass = [torch.logsumexp(logps, -1, keepdim=True) for logps in (lp, lq)]
    if not x.settings.tail:
        return lp - mass[0], lq - mass[1]
    tails = [torch.log(-torch.expm1(m.clamp(max=LARGEST_LOG_MASS))) for m in mass]
    return torch.cat([lp, tails[0]], -1), torch.cat([lq, tails[1]], -1)


def _weighted(lp: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """p (log p - other), 0 where p is 0; a log-prob beyond the range of its dtype shows as an infinite loss."""
    p = lp.exp()
    return torch.where(p > 0, p, 0.0) * torch.where(p > 0, lp - other, 0.0)


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


def by_blocks(lp: torch.Tensor, lq: torch.Tensor, beta: float) -> torch.Tensor:
    """Per block of the vocabulary, from the last to the first."""
    parts = zip(lp.split(BLOCK, -1), lq.split(BLOCK, -1), strict=True)
    total = lp.new_zeros(lp.shape[0])
    for a, b in reversed(list(parts)):
        total = total + by_log_mixture(a, b, beta)
    return total


@dataclasses.dataclass(frozen=True)
class Road:
    """An algorithm from inputs to the loss, and the recipe it computes in.

    Attributes:
        width: float32 throughout, from the stored logits on, or nowhere: the dtype of each head down to its terms.
        measure: the divergence of each token.
        weighted_last: whether the sum over the tokens is divided, or every token.
    """

    width: Width
    measure: Measure
    weighted_last: bool

    def __call__(self, x: Inputs) -> Outputs:
        per_token = self.measure(*_log_probs(x, self.width), x.settings.beta).float()
        count = (x.ids != IGNORE_INDEX).sum().clamp(min=1) if x.num_items_in_batch is None else x.num_items_in_batch
        return {"loss": per_token.sum() / count if self.weighted_last else (per_token / count).sum()}

    def recipe(self, x: Inputs) -> Recipe:
        """float32; logits stored in the dtype of their head; or everything in it, the teacher's in its own."""
        if self.width == "wide":
            return Recipe()
        dtype, teacher = plain.head_dtype(x), None if x.settings.sparse != "none" else "input"
        stored = Recipe(logits=dtype, dlogits=dtype, teacher=teacher)
        if self.width == "stored":
            return stored
        return dataclasses.replace(
            stored, elementwise=dtype, softmax=dtype, teacher_softmax=teacher, teacher_elementwise=teacher
        )


ROADS = {
    "ieee": Road("wide", by_log_mixture, True),
    "stored": Road("stored", by_log_mixture, False),
    "blocks": Road("stored", by_blocks, True),
    "narrow": Road("narrow", by_log_mixture, False),
}
