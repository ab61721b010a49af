"""What the loss makes of log-probs, held against its definition: the gradient that reaches each log-prob, and its value; of whole
distributions or plain logits its value alone. A loss of advantages that cancel is 0; the gradients of its log-probs are not."""

import contextlib
import functools
import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from parity.judge.shaken import Rounded, Shaken, unit
from parity.rollouts.scoring import CHUNK, LIMIT, drops, noise, rows_of, score, tables, undisturbed
from parity.testing.definitions import jsd, kl
from parity.trainers.definitions.micro_batch import Define, Loss, accumulation, defined, loss_mask

OPERATIONS, CANCELLED = 64, 8
"""Roundings that a gradient may be off by: of its own size in the log-probs' dtype; of the largest's in float32, of terms that
cancel. In 16 bits the shaken log-probs move such terms further than the second would, and rows of other lengths are smaller."""
DRAWS = 4  # shaken evaluations of a definition
BETWEEN = 8
"""By which what float32 makes of a definition's own operations is multiplied: a saturated 1 - σ is off by σ's rounding, however
small its slope. The largest of 4 draws of ±u is below u/2 once in 16; times 8 it covers 4u, two ulps, of torch's functions."""


def slopes(of: Define, logps: Tensor) -> tuple[Tensor, Tensor]:
    """The loss, 0-dim, and ∂loss/∂log-prob, (B, T), of log-probs float64."""
    lp = logps.clone().requires_grad_()
    with torch.enable_grad():
        loss = of(lp)
        (found,) = torch.autograd.grad(loss, lp)
    return loss.detach(), found


def faults(
    trainer: Any, loss: Loss, logps: Tensor, found: Tensor, value: float | None, own: bool = False
) -> tuple[str, list[str]] | None:
    """Where the gradients `found` (B, T) of the log-probs, or the loss, are not the definition's: which, and what they are, if
    that is known; of an `own` loss the gradients alone. Allowed is what rounding of log-probs, `OPERATIONS` times their unit, and
    of what comes behind them makes, and what float32 flushes: a term below its smallest normal number may be 0."""
    lp, u = logps.double().cpu(), OPERATIONS * unit(logps.dtype)
    exact, slope = slopes(loss.of, lp)
    random = torch.Generator().manual_seed(0)
    signs = torch.randint(0, 2, (DRAWS, *lp.shape), generator=random).double() * 2 - 1
    near = [slopes(loss.of, lp + u * (1 + lp.abs()) * sign) for sign in signs]
    flushed = torch.finfo(torch.float32).smallest_normal * lp.numel()
    bound = u * slope.abs() + CANCELLED * unit(torch.float32) * slope.abs().amax() + flushed
    bound += torch.stack([(x - slope).abs() for _, x in near]).amax(0)
    allowed = max(float((x - exact).abs()) for x, _ in near) + u * float(exact.abs() + slope.abs().sum() + loss.size)
    allowed += flushed
    off = (found - slope).abs()
    far = 0.0 if value is None or own or not loss.valued else abs(value - float(exact))
    if far <= allowed and not bool((off > bound).any()):
        return None
    logged, each = _between(loss, lp, exact, slope)
    bound += each
    if bool((off > bound).any()):
        named = _named(trainer, loss, lp, found, slope, bound) or _seen(loss, found, slope, bound)
        apart = f" ({float(off.norm() / slope.norm().clamp(min=flushed)):.2g} of their norm apart)" * (not named)
        return f"gradients of the log-probs are not those of {loss.name}{apart}", named
    if value is None or far <= allowed + float(logged):
        return None
    right = "; gradients are right" * math.isfinite(value)
    return f"the loss that is logged is {value:.6g}", [_times(value, float(exact)) + right]


def _between(loss: Loss, lp: Tensor, exact: Tensor, slope: Tensor) -> Tensor:
    """What rounding of the definition's own operations may make of the loss, and of a gradient, (2,)."""
    out = []
    for seed in range(DRAWS):
        with Rounded(seed):
            value, by = slopes(loss.of, lp)
        out.append(torch.stack([(value - exact).abs(), (by - slope).abs().amax()]))
    return BETWEEN * torch.stack(out).nan_to_num(0.0, 0.0, 0.0).amax(0)


def _named(trainer: Any, loss: Loss, lp: Tensor, found: Tensor, slope: Tensor, bound: Tensor) -> list[str]:
    tried = {cause: slopes(of, lp)[1] for cause, of in loss.without.items()}
    if loss.padded is not None:
        tried["padding is counted in the normaliser"] = slope * loss.padded
    tried |= {cause: slope * factor for cause, factor in _counts(trainer)}

    def fits(other: Tensor) -> bool:
        wide = bound * max(1.0, float(other.norm() / slope.norm().clamp(min=1e-30)))
        return bool(((found - other).abs() <= wide).all()) and not bool(((other - slope).abs() <= 4 * wide).all())

    if named := [name for name, other in tried.items() if fits(other)]:
        return named
    times = float((found * slope).sum() / slope.square().sum().clamp(min=1e-30))
    return [f"{times:.4g} times the definition's"] if fits(times * slope) else []


def _seen(loss: Loss, found: Tensor, slope: Tensor, bound: Tensor) -> list[str]:
    inside, some = loss.mask.bool(), found != 0
    seen = {
        "masked tokens have a gradient": some & ~inside,
        "tokens of the loss have none": inside & ~some & (slope.abs() > bound),
    }
    return [f"{int(of.sum())} {what}" for what, of in seen.items() if of.any()]


def _counts(trainer: Any) -> Iterator[tuple[str, float]]:
    """What a forgotten count is called, and by how much it makes the loss too large."""
    counts = {
        "micro-batches of an optimizer step": accumulation(trainer),
        "ranks": trainer.accelerator.num_processes,
        "micro-batches of a generation batch": getattr(trainer.args, "steps_per_generation", None) or 1,
    }
    for n in sorted({*counts.values()}):
        of = " or the ".join(name for name, count in counts.items() if count == n)
        yield f"{n} times too large, as if not divided by the {of}", n
        yield f"{n} times too small, as if divided by the {of} once too often", 1 / n


def distilled(trainer: Any, model: Any, inputs: Any, value: float) -> tuple[str, list[str]] | None:
    """Where the loss that is logged is not Σ JSD(student, teacher) / N over the completion tokens, N those of the optimizer
    step, by both models' own logits. Allowed is three times what rounding makes of each token, errors of one sign."""
    items, other = inputs.get("num_items_in_batch"), getattr(trainer.args, "loss_top_k", 0) or "pixel_values" in inputs
    if items is None or other or getattr(trainer, "aux_loss_enabled", False) or drops(trainer.model):
        return None
    ids, attention = (torch.cat([inputs[f"prompt_{of}"], inputs[f"completion_{of}"]], 1) for of in ("ids", "mask"))
    rows, tau = rows_of(ids, attention, loss_mask(inputs), len(ids)), trainer.temperature

    def terms(*shaken: Any) -> Tensor:
        with contextlib.ExitStack() as stack:
            for mode in (undisturbed(model), trainer.accelerator.autocast(), *shaken):
                stack.enter_context(mode)
            both = [tables(m, rows) for m in (model, trainer.teacher_model)]
            logits = zip(*((z for _, all, _ in of for z in all.split(CHUNK)) for of in both), strict=True)
            each = [_divergences(q.double() / tau, p.double() / tau, trainer.beta) for q, p in logits]
        return torch.cat(each) / (float(items) / trainer.accelerator.num_processes)

    each = terms()
    off = torch.stack([terms(Shaken(seed)) - each for seed in range(2)]).abs().amax(0)
    exact, allowed = float(each.sum()), float((LIMIT * off + OPERATIONS * unit(torch.float32) * each.abs()).sum())
    return _valued(trainer, value, exact, allowed, {})


def summed(trainer: Any, model: Any, inputs: Any, items: Any, value: float) -> tuple[str, list[str]] | None:
    """The same of a loss by plain logits of a causal language model, held against TRL's by the model's own forward."""
    given: list[Any] = [inputs.get(n) for n in ("input_ids", "attention_mask", "labels")]
    other = "position_ids" in inputs, getattr(trainer, "aux_loss_enabled", False), trainer.accelerator.num_processes > 1
    shapes, smooth = {getattr(x, "shape", ()) for x in given}, getattr(trainer.args, "label_smoothing_factor", 0)
    if smooth or any(other) or len(shapes) > 1 or len(*shapes) != 2 or drops(trainer.model):
        return None
    mask = (given[2] != -100)[:, 1:]
    rows = rows_of(given[0], given[1], mask, len(mask))
    with undisturbed(model), trainer.accelerator.autocast():
        mine = noise(model, rows, 1.0, score(model, rows, 1.0))
    lp = rows.back(mine.logps).nan_to_num(0.0)
    loss = defined(trainer, inputs, SimpleNamespace(logps=lp), mask, (), items)
    assert loss is not None
    exact, slope = slopes(loss.of, lp)
    allowed = (LIMIT * mine.noise + OPERATIONS * unit(torch.float32) * (1 + lp.abs())) * slope.abs()
    others = {cause: float(of(lp)) for cause, of in loss.without.items()}
    return _valued(trainer, value, float(exact), float(allowed.sum()), others)


def _valued(trainer: Any, value: float, exact: float, allowed: float, others: Any) -> tuple[str, list[str]] | None:
    """Where the `value` that is logged is not the `exact` one; `others`: cause -> the value that it makes."""
    if abs(value - exact) <= allowed:
        return None
    tried = others | {cause: n * exact for cause, n in _counts(trainer) if n != 1}
    named = [n for n, x in tried.items() if abs(value - x) <= max(x / exact, 1.0) * allowed] if exact else []
    return f"the loss that is logged is {value:.6g}, {_times(value, exact)}", named


def _divergences(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """Generalised JSD of each token by logits (n, V), (n,): KL(teacher ‖ student) at beta 0, KL(student ‖ teacher) at 1."""
    q, p = (z.log_softmax(-1)[:, None] for z in (student, teacher))
    if beta in (0, 1):
        return torch.vmap(kl)(*((q, p) if beta == 0 else (p, q)))
    return torch.vmap(functools.partial(jsd, beta=beta))(q, p)


def _times(value: float, exact: float) -> str:
    return f"{f'{value / exact:.4g} times' if exact else 'not'} its definition's, {exact:.6g}"
