"""Mutants of family `divergence`: one step of a correct distillation loss exchanged for a wrong one."""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from cases.selftest.controls.divergence import (
    Pair,
    Steps,
    by_log_mixture,
    completed,
    count,
    divided,
    rows,
    student,
    tail,
    teacher,
)
from cases.selftest.mutants.conduct import around
from cases.selftest.mutants.mutant import Edited
from cases.selftest.mutants.steps import Wrong, defaults, exchanged, scaled_gradients
from parity.case.inputs import Inputs
from parity.families.head import IGNORE_INDEX


def _top(z: Tensor) -> Tensor:
    return z.amax(-1, keepdim=True).detach().clamp(min=0.0)


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
    out = teacher(x)
    out.head.weight, out.head.bias = x.teacher_weight, x.teacher_bias
    return out


def _row_means(x: Inputs, per_token: Tensor) -> Tensor:
    if x.num_items_in_batch is not None:
        return divided(x, per_token)
    kept = (x.ids != IGNORE_INDEX).long()
    each = torch.zeros(x.ids.numel(), device=x.device).masked_scatter(rows(x), per_token.float()).view(x.ids.shape)
    return (each.sum(1) / kept.sum(1).clamp(min=1)).sum() / kept.any(1).sum().clamp(min=1)


def _one_more(x: Inputs) -> float:
    n = float(count(x))
    return n / (n + 1)


def _always_tail(x: Inputs, lp: Tensor, lq: Tensor) -> Pair:
    both = (torch.cat([l, tail(torch.logsumexp(l, -1, keepdim=True))], -1) for l in (lp, lq))
    return next(both), next(both)


def _tail_detached(x: Inputs, lp: Tensor, lq: Tensor) -> Pair:
    lp, lq = completed(x, lp, lq)
    return (torch.cat([lp[:, :-1], lp[:, -1:].detach()], -1), lq) if x.settings.tail else (lp, lq)


def _padding_kept(x: Inputs, lp: Tensor) -> Pair:
    chosen = rows(x)
    return lp.gather(-1, x.support_ids.flatten(0, 1)[chosen]), x.support_logps.flatten(0, 1)[chosen]


def _mutants() -> Wrong:
    found = around(Steps(), "ids", "teacher_hidden", "teacher_weight", "support_ids", "support_logps")
    for name, mistake, read in scaled_gradients("hidden", "weight", "bias"):
        found[name] = (mistake, Steps(read=read))
    for who, model in (("student", student), ("teacher", teacher)):
        of = f"of the {who} forgotten"
        for name, mistake, step in (
            ("temperature", f"temperature {of}", _with(model, temperature=1.0)),
            ("softcap", f"softcap {of}", _with(model, softcap=None)),
            ("scale", f"logit scale {of}", _with(model, scale=1.0)),
            ("bias", f"bias of the {who}'s head forgotten", _without_bias(model)),
        ):
            found[f"{name}-forgotten-{who}"] = (mistake, Steps(**{who: step}))  # type: ignore[arg-type]
    for name, mistake, steps in exchanged("divergence", defaults(Steps), globals()):
        found[name] = (mistake, Steps(**steps))  # type: ignore[arg-type]
    return found


EDITED = Edited({"steps": Steps()}, _mutants())
