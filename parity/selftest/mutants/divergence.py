"""Mutants of family `divergence`: one step of a correct distillation loss exchanged for a wrong one."""

import dataclasses
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from parity.case.inputs import Inputs
from parity.families.divergence import LARGEST_LOG_MASS
from parity.families.logprobs import IGNORE_INDEX
from parity.implementations.implementation import Outputs
from parity.selftest.controls.divergence import by_log_mixture
from parity.selftest.mutants import Edited
from parity.selftest.mutants.conduct import around
from parity.selftest.mutants.steps import (
    Wrong,
    defaults,
    exchanged,
    scaled_gradients,
)

Pair = tuple[Tensor, Tensor]


def _student(x: Inputs) -> SimpleNamespace:
    s = x.settings
    head = SimpleNamespace(hidden=x.hidden, weight=x.weight, bias=x.bias)
    return SimpleNamespace(head=head, scale=s.logit_scale, softcap=s.softcap, temperature=s.temperature)


def _teacher(x: Inputs) -> SimpleNamespace:
    s = x.settings
    bias = None if x.teacher_bias is None else x.teacher_bias[: s.V]
    weight = None if x.teacher_weight is None else x.teacher_weight[: s.V]
    head = SimpleNamespace(hidden=x.teacher_hidden, weight=weight, bias=bias)
    scale, softcap = s.teacher_logit_scale, s.teacher_softcap
    return SimpleNamespace(head=head, scale=scale, softcap=softcap, temperature=s.temperature)


def _logits(m: SimpleNamespace) -> Tensor:
    """softcap(scale·(h Wᵀ + b))/τ, (B·T, V), in float32."""
    bias = None if m.head.bias is None else m.head.bias.float()
    z = linear(m.head.hidden.flatten(0, 1).float(), m.head.weight.float(), bias) * m.scale
    return (z if m.softcap is None else m.softcap * torch.tanh(z / m.softcap)) / m.temperature


def _teacher_logits(x: Inputs, m: SimpleNamespace) -> Tensor:
    if x.teacher_logits is None:
        return _logits(m)
    return x.teacher_logits.flatten(0, 1)[:, : x.settings.V].float() / m.temperature


def _rows(x: Inputs) -> Tensor:
    """The label positions, (B·T,)."""
    return x.ids.flatten() != IGNORE_INDEX


def _completed(x: Inputs, lp: Tensor, lq: Tensor) -> Pair:
    """Both completed by a tail bucket, or renormalised."""
    mass = [torch.logsumexp(logps, -1, keepdim=True) for logps in (lp, lq)]
    if not x.settings.tail:
        return lp - mass[0], lq - mass[1]
    return tuple(torch.cat([v, _tail(m)], -1) for v, m in zip((lp, lq), mass, strict=True))


def _tail(mass: Tensor) -> Tensor:
    return torch.log(-torch.expm1(mass.clamp(max=LARGEST_LOG_MASS)))


def _supported(x: Inputs, lp: Tensor) -> Pair:
    """Log-probs of the tokens that a sparse teacher names, -inf where it names fewer."""
    rows = _rows(x)
    lq, ids = x.support_logps.flatten(0, 1)[rows], x.support_ids.flatten(0, 1)[rows]
    return lp.gather(-1, ids).masked_fill(lq == -torch.inf, -torch.inf), lq


def _divided(x: Inputs, per_token: Tensor) -> Tensor:
    """Sum over the label positions ÷ their number or num_items_in_batch."""
    count = _rows(x).sum().clamp(min=1) if x.num_items_in_batch is None else x.num_items_in_batch
    return per_token.sum() / count


def _top(z: Tensor) -> Tensor:
    return z.amax(-1, keepdim=True).detach().clamp(min=0.0)


@dataclasses.dataclass(frozen=True)
class Steps:
    """The steps in order: inputs, both models, log-probs of the label positions, support, measure, normaliser, loss."""

    read: Callable[[Inputs], Inputs] = lambda x: x
    student: Callable[[Inputs], SimpleNamespace] = _student
    teacher: Callable[[Inputs], SimpleNamespace] = _teacher
    rows: Callable[[Inputs], Tensor] = _rows
    log_softmax: Callable[[Tensor], Tensor] = lambda z: torch.log_softmax(z, -1)
    supported: Callable[[Inputs, Tensor], Pair] = _supported
    completed: Callable[[Inputs, Tensor, Tensor], Pair] = _completed
    measure: Callable[[Tensor, Tensor, float], Tensor] = by_log_mixture
    divided: Callable[[Inputs, Tensor], Tensor] = _divided
    loss: Callable[[Inputs, Tensor], Tensor] = lambda x, loss: loss

    def pair(self, x: Inputs) -> Pair:
        """Student's and teacher's log-probs of the label positions, over the vocabulary or the completed support."""
        lp = self.log_softmax(_logits(self.student(x)))[self.rows(x)]
        if x.settings.sparse != "none":
            return self.completed(x, *self.supported(x, lp))
        return lp, self.log_softmax(_teacher_logits(x, self.teacher(x)))[self.rows(x), : x.settings.V]

    def call(self, x: Inputs) -> Outputs:
        """As an adapter of family `divergence`."""
        x = self.read(x)
        return {"loss": self.loss(x, self.divided(x, self.measure(*self.pair(x), x.settings.beta)))}


def _with(model: Callable[[Inputs], SimpleNamespace], **values: Any) -> Callable[[Inputs], SimpleNamespace]:
    return lambda x: SimpleNamespace(**vars(model(x)) | values)


def _without_bias(model: Callable[[Inputs], SimpleNamespace]) -> Callable[[Inputs], SimpleNamespace]:
    def step(x: Inputs) -> SimpleNamespace:
        out = model(x)
        out.head.bias = None
        return out

    return step


def _mixed(p: Tensor, q: Tensor, b: float, m: Tensor) -> Tensor:
    p, q = p.clamp(min=-1e30), q.clamp(min=-1e30)
    return (b * q.exp() * (q - m) + (1 - b) * p.exp() * (p - m)).sum(-1)


def _jsd(mixture: Callable[[Tensor, Tensor, float], Tensor]) -> Callable[[Tensor, Tensor, float], Tensor]:
    def measure(p: Tensor, q: Tensor, b: float) -> Tensor:
        return by_log_mixture(p, q, b) if b in (0.0, 1.0) else _mixed(p, q, b, mixture(p, q, b))

    return measure


def _mixture(p: Tensor, q: Tensor, b: float) -> Tensor:
    return torch.logaddexp(p.clamp(min=-1e30) + math.log(1 - b), q.clamp(min=-1e30) + math.log(b))


def _weight_detached(p: Tensor, q: Tensor, b: float) -> Tensor:
    p, q = p.clamp(min=-1e30), q.clamp(min=-1e30)
    return (p.detach().exp() * (p - q)).sum(-1) if b == 1.0 else by_log_mixture(p, q, b)


def _padded_teacher(x: Inputs) -> SimpleNamespace:
    out = _teacher(x)
    out.head.weight, out.head.bias = x.teacher_weight, x.teacher_bias
    return out


def _row_means(x: Inputs, per_token: Tensor) -> Tensor:
    if x.num_items_in_batch is not None:
        return _divided(x, per_token)
    kept = (x.ids != IGNORE_INDEX).long()
    each = torch.zeros(x.ids.numel(), device=x.device).masked_scatter(_rows(x), per_token.float()).view(x.ids.shape)
    return (each.sum(1) / kept.sum(1).clamp(min=1)).sum() / kept.any(1).sum().clamp(min=1)


def _one_more(x: Inputs) -> float:
    n = float(_rows(x).sum().clamp(min=1) if x.num_items_in_batch is None else x.num_items_in_batch)
    return n / (n + 1)


def _always_tail(x: Inputs, lp: Tensor, lq: Tensor) -> Pair:
    return torch.cat([lp, _tail(torch.logsumexp(lp, -1, keepdim=True))], -1), torch.cat(
        [lq, _tail(torch.logsumexp(lq, -1, keepdim=True))], -1
    )


def _tail_detached(x: Inputs, lp: Tensor, lq: Tensor) -> Pair:
    lp, lq = _completed(x, lp, lq)
    return (torch.cat([lp[:, :-1], lp[:, -1:].detach()], -1), lq) if x.settings.tail else (lp, lq)


def _padding_kept(x: Inputs, lp: Tensor) -> Pair:
    rows = _rows(x)
    return lp.gather(-1, x.support_ids.flatten(0, 1)[rows]), x.support_logps.flatten(0, 1)[rows]


def _mutants() -> Wrong:
    found = around(Steps().call, "ids", "teacher_hidden", "teacher_weight", "support_ids", "support_logps")
    for name, mistake, read in scaled_gradients("hidden", "weight", "bias"):
        found[name] = (mistake, Steps(read=read).call)
    for who, model in (("student", _student), ("teacher", _teacher)):
        of = f"of the {who} forgotten"
        for name, mistake, step in (
            ("temperature", f"temperature {of}", _with(model, temperature=1.0)),
            ("softcap", f"softcap {of}", _with(model, softcap=None)),
            ("scale", f"logit scale {of}", _with(model, scale=1.0)),
            ("bias", f"bias of the {who}'s head forgotten", _without_bias(model)),
        ):
            found[f"{name}-forgotten-{who}"] = (mistake, Steps(**{who: step}).call)  # type: ignore[arg-type]
    for name, mistake, steps in exchanged("divergence", defaults(Steps), globals()):
        found[name] = (mistake, Steps(**steps).call)
    return found


EDITED = Edited({"steps": Steps().call}, _mutants())
