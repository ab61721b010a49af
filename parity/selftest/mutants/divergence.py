"""Mutants of family `divergence`: one step of a correct distillation loss exchanged for a wrong one."""

import dataclasses
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from parity.case.inputs import Inputs
from parity.families.divergence import LARGEST_LOG_MASS
from parity.families.logprobs import IGNORE_INDEX
from parity.implementations.implementation import Adapter, Outputs
from parity.selftest.controls.divergence import by_log_mixture
from parity.selftest.mutants import Edited
from parity.selftest.mutants.conduct import MISCONDUCT, misread
from parity.selftest.mutants.steps import through, with_gradient

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


CORRECT: dict[str, Adapter] = {"steps": Steps().call}
"""What the mutants are edits of: the control."""

MUTANTS: dict[str, tuple[str, Adapter]] = {
    name: (mistake, wrong(Steps().call))
    for name, (mistake, wrong) in (
        MISCONDUCT | misread("ids", "teacher_hidden", "teacher_weight", "support_ids", "support_logps")
    ).items()
}
"""Name -> the mistake in one line, and the adapter that makes it."""


def _wrong(name: str, mistake: str, **edits: Any) -> None:
    MUTANTS[name] = (mistake, Steps(**edits).call)


def _with(model: Callable[[Inputs], SimpleNamespace], **values: Any) -> Callable[[Inputs], SimpleNamespace]:
    return lambda x: SimpleNamespace(**vars(model(x)) | values)


def _without_bias(model: Callable[[Inputs], SimpleNamespace]) -> Callable[[Inputs], SimpleNamespace]:
    def step(x: Inputs) -> SimpleNamespace:
        out = model(x)
        out.head.bias = None
        return out

    return step


def _factor(size: float) -> Callable[[Tensor], Tensor]:
    return lambda g: g * (1 + size)


for _label, _size in (("1e-2", 1e-2), ("1e-3", 1e-3)):
    _wrong(f"loss-scaled-{_label}", f"loss × (1 + {_label})", loss=lambda x, v, f=1 + _size: v * f)
    for _leaf in ("hidden", "weight", "bias"):
        _wrong(
            f"grad-{_leaf}-scaled-{_label}",
            f"gradient of {_leaf} × (1 + {_label})",
            read=with_gradient(_factor(_size), _leaf),
        )
for _leaf in ("hidden", "weight", "bias"):
    _wrong(f"grad-{_leaf}-missing", f"silent None gradient of {_leaf}", read=with_gradient(lambda g: None, _leaf))

_wrong("direction-swapped", "student and teacher exchanged", measure=lambda p, q, b: by_log_mixture(q, p, b))
_wrong("beta-swapped", "beta read as the student's weight", measure=lambda p, q, b: by_log_mixture(p, q, 1 - b))
_wrong("beta-ignored", "always the forward divergence", measure=lambda p, q, b: by_log_mixture(p, q, 0.0))
_wrong("beta-half", "JSD always at beta 0.5", measure=lambda p, q, b: by_log_mixture(p, q, b if b in (0, 1) else 0.5))


def _mixed(p: Tensor, q: Tensor, b: float, m: Tensor) -> Tensor:
    p, q = p.clamp(min=-1e30), q.clamp(min=-1e30)
    return (b * q.exp() * (q - m) + (1 - b) * p.exp() * (p - m)).sum(-1)


def _jsd(mixture: Callable[[Tensor, Tensor, float], Tensor]) -> Callable[[Tensor, Tensor, float], Tensor]:
    def measure(p: Tensor, q: Tensor, b: float) -> Tensor:
        return by_log_mixture(p, q, b) if b in (0.0, 1.0) else _mixed(p, q, b, mixture(p, q, b))

    return measure


def _mixture(p: Tensor, q: Tensor, b: float) -> Tensor:
    return torch.logaddexp(p.clamp(min=-1e30) + math.log(1 - b), q.clamp(min=-1e30) + math.log(b))


_wrong("mixture-exchanged", "mixture with the weights exchanged", measure=_jsd(lambda p, q, b: _mixture(p, q, 1 - b)))
_wrong("mixture-even", "mixture without its weights", measure=_jsd(lambda p, q, b: _mixture(p, q, 0.5)))
_wrong(
    "mixture-geometric",
    "mixture of log-probs for one of probabilities",
    measure=_jsd(lambda p, q, b: (1 - b) * p.clamp(min=-1e30) + b * q.clamp(min=-1e30)),
)
_wrong("mixture-detached", "no gradient through the mixture", measure=_jsd(lambda p, q, b: _mixture(p, q, b).detach()))
_wrong(
    "outer-weights-swapped",
    "weights of the two divergences exchanged, the mixture's kept",
    measure=lambda p, q, b: by_log_mixture(p, q, b) if b in (0.0, 1.0) else _mixed(p, q, 1 - b, _mixture(p, q, b)),
)


def _cross_entropy(p: Tensor, q: Tensor, b: float) -> Tensor:
    return by_log_mixture(p, q, b) if b else -(q.exp() * p.clamp(min=-1e30)).sum(-1)


def _weight_detached(p: Tensor, q: Tensor, b: float) -> Tensor:
    p, q = p.clamp(min=-1e30), q.clamp(min=-1e30)
    return (p.detach().exp() * (p - q)).sum(-1) if b == 1.0 else by_log_mixture(p, q, b)


_wrong("cross-entropy", "teacher's entropy left out of the forward divergence", measure=_cross_entropy)
_wrong("reverse-weight-detached", "reverse divergence: no gradient through its weight p", measure=_weight_detached)
_wrong(
    "vocabulary-mean",
    "mean over the vocabulary for the sum",
    measure=lambda p, q, b: by_log_mixture(p, q, b) / p.shape[-1],
)
_wrong(
    "last-token-of-vocabulary-dropped",
    "last entry of the vocabulary left out of the sum",
    measure=lambda p, q, b: by_log_mixture(p[:, :-1], q[:, :-1], b),
)
_wrong(
    "clamped-at-zero",
    "terms of the sum clamped at zero (a divergence is not negative, but its terms are)",
    measure=lambda p, q, b: (
        (q.exp() * (q - p.clamp(min=-1e30))).nan_to_num(0.0).clamp(min=0).sum(-1) if b == 0 else by_log_mixture(p, q, b)
    ),
)

for _who, _model in (("student", _student), ("teacher", _teacher)):
    _wrong(
        f"temperature-forgotten-{_who}",
        f"temperature of the {_who} forgotten",
        **{_who: _with(_model, temperature=1.0)},
    )
    _wrong(f"softcap-forgotten-{_who}", f"softcap of the {_who} forgotten", **{_who: _with(_model, softcap=None)})
    _wrong(f"scale-forgotten-{_who}", f"logit scale of the {_who} forgotten", **{_who: _with(_model, scale=1.0)})
    _wrong(f"bias-forgotten-{_who}", f"bias of the {_who}'s head forgotten", **{_who: _without_bias(_model)})
_wrong(
    "temperature-squared",
    "loss × τ², as for gradients of soft labels",
    loss=lambda x, v: v * x.settings.temperature**2,
)
_wrong(
    "softcap-of-student-for-teacher",
    "the student's softcap put on the teacher",
    teacher=lambda x: SimpleNamespace(**vars(_teacher(x)) | {"softcap": x.settings.softcap}),
)
_wrong(
    "without-max",
    "log-softmax without the largest logit",
    log_softmax=lambda z: z - z.exp().sum(-1, keepdim=True).log(),
)
_wrong(
    "maximum-from-zero",
    "softmax with a running maximum that starts at 0",
    log_softmax=lambda z: z - _top(z) - (z - _top(z)).exp().sum(-1, keepdim=True).log(),
)
_wrong(
    "bf16-softmax", "log-softmax rounded to bfloat16", log_softmax=lambda z: torch.log_softmax(z, -1).bfloat16().float()
)


def _padded_teacher(x: Inputs) -> SimpleNamespace:
    out = _teacher(x)
    out.head.weight, out.head.bias = x.teacher_weight, x.teacher_bias
    return out


_wrong(
    "teacher-padding-kept",
    "padding rows of the teacher's head kept in its softmax",
    teacher=_padded_teacher,
)


def _all_rows(x: Inputs) -> Tensor:
    return torch.ones_like(x.ids.flatten(), dtype=torch.bool)


def _all_positions(x: Inputs, per_token: Tensor) -> Tensor:
    return per_token.sum() / (x.ids.numel() if x.num_items_in_batch is None else x.num_items_in_batch)


def _row_means(x: Inputs, per_token: Tensor) -> Tensor:
    if x.num_items_in_batch is not None:
        return _divided(x, per_token)
    kept = (x.ids != IGNORE_INDEX).long()
    each = torch.zeros(x.ids.numel(), device=x.device).masked_scatter(_rows(x), per_token.float()).view(x.ids.shape)
    return (each.sum(1) / kept.sum(1).clamp(min=1)).sum() / kept.any(1).sum().clamp(min=1)


_wrong(
    "upstream-in-bf16",
    "upstream gradient rounded to bfloat16",
    loss=lambda x, v: through(v, lambda g: g.bfloat16().to(g)),
)
_wrong(
    "upstream-in-fp16",
    "upstream gradient rounded to float16",
    loss=lambda x, v: through(v, lambda g: g.clamp(-65504, 65504).half().to(g)),
)
_wrong("labels-inverted", "only positions with label -100 scored", rows=lambda x: ~_rows(x))
_wrong(
    "labels-ignored",
    "positions with label -100 scored too",
    rows=lambda x: _all_rows(x) if x.support_ids is None else _rows(x),
)
_wrong("labels-shifted", "shift by one: the mask of the next position", rows=lambda x: _rows(x).roll(1))
_wrong("last-position-dropped", "last position dropped", divided=lambda x, v: _divided(x, pad(v[:-1], (0, 1))))
_wrong("divided-by-positions", "divided by all positions, labels or not", divided=_all_positions)
_wrong("items-ignored", "num_items_in_batch ignored", divided=lambda x, v: v.sum() / _rows(x).sum().clamp(min=1))
_wrong("items-plus-one", "divided by N + 1", divided=lambda x, v: _divided(x, v) * _one_more(x))
_wrong("sequence-mean", "divided by the number of sequences", divided=lambda x, v: v.sum() / x.ids.shape[0])
_wrong("mean-of-means", "mean over sequences of the mean over positions", divided=_row_means)
_wrong(
    "empty-nan",
    "no label position: 0/0",
    divided=lambda x, v: _divided(x, v) if x.num_items_in_batch is not None else v.sum() / _rows(x).sum(),
)


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


def _renormalised(x: Inputs, lp: Tensor, lq: Tensor) -> Pair:
    return torch.log_softmax(lp, -1), torch.log_softmax(lq, -1)


def _teacher_only(x: Inputs, lp: Tensor, lq: Tensor) -> Pair:
    return (lp, _completed(x, lp, lq)[1]) if not x.settings.tail else _completed(x, lp, lq)


def _padding_kept(x: Inputs, lp: Tensor) -> Pair:
    rows = _rows(x)
    return lp.gather(-1, x.support_ids.flatten(0, 1)[rows]), x.support_logps.flatten(0, 1)[rows]


_wrong("tail-dropped", "sparse teacher: renormalised where a tail bucket is asked for", completed=_renormalised)
_wrong("tail-always", "sparse teacher: tail bucket where none is asked for", completed=_always_tail)
_wrong("tail-detached", "sparse teacher: no gradient through the student's tail", completed=_tail_detached)
_wrong("student-not-renormalised", "sparse teacher: only the teacher renormalised", completed=_teacher_only)
_wrong(
    "support-padding-kept",
    "sparse teacher: padding of a short support enters the student's mass",
    supported=_padding_kept,
)

EDITED = Edited(CORRECT, MUTANTS, ("plain",), {})
