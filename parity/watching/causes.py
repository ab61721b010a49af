"""What a difference of log-probs may come from: each cause fitted, named only where it explains the difference down to noise."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from parity.rollouts.judge import kept_mass
from parity.watching.own import Rows, Scores, innermost

LIMIT, FARTHEST = 3.0, 15.0
"""Units that the rms of all differences, and the largest of them, may reach."""
REDUCED = 0.35
"""Share of the rms that a cause may leave."""
SUPPORTS = (
    *((p, 0, 0.0) for p in (0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99)),
    *((1.0, k, 0.0) for k in (1, 5, 10, 20, 40, 50, 64, 100)),
    *((1.0, 0, m) for m in (0.01, 0.02, 0.05, 0.1, 0.2)),
)
"""Top-p, top-k and min-p that are tried besides those of the run and of the model's generation config."""
NAMES = {
    "softcap": ("final_logit_softcapping", "logits_soft_cap", "logit_softcap"),
    "scale": ("logit_scale", "output_multiplier", "lm_head_multiplier", "logits_scaling"),
}
"""What a transformers config calls what a model does to logits."""
BOUNDARY = 2.0
"""Units within which rounding decides which tokens top-p or min-p keeps."""


@dataclasses.dataclass(frozen=True)
class Difference:
    """Log-probs (n,) against a model's own, in units of its noise; NaN: there is none."""

    values: Tensor
    own: Scores

    def units(self, against: Tensor | None = None, of: Tensor | None = None) -> Tensor:
        """Of the tokens `of` that have one, against the model's own log-probs or `against`."""
        exact = self.own.logps if against is None else against
        there = ~self.values.isnan() & exact.isfinite()
        return ((self.values - exact) / self.own.units)[there if of is None else there & of]


def rms(units: Tensor) -> float:
    """√mean x², infinite where one is; 0 of nothing."""
    return float(units.square().mean().sqrt()) if len(units) else 0.0


def agrees(units: Tensor) -> bool:
    """Whether noise explains these differences."""
    return rms(units) <= LIMIT and (len(units) == 0 or float(units.abs().max()) <= FARTHEST)


@dataclasses.dataclass(frozen=True)
class Facts:
    """What is known of the run.

    Attributes:
        temperature: of the trainer's log-probs.
        sampled: whether the log-probs are a sampler's.
        sampling: top-p, top-k and min-p of the run's config and of the model's generation config.
        head: other product of the LM head -> its logits (m, V) of the sample.
        others: other computation -> its log-probs (n,); asked only if needed.
        coarser: narrower dtype -> the model's own scores with its noise.
    """

    temperature: float
    sampled: bool = True
    sampling: Sequence[tuple[float, int, float]] = ()
    head: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)
    others: Mapping[str, Callable[[], Tensor]] = dataclasses.field(default_factory=dict)
    coarser: Mapping[str, Callable[[], Scores]] = dataclasses.field(default_factory=dict)


def explanations(found: Difference, rows: Rows, facts: Facts) -> list[str]:
    """The causes that explain the difference down to noise, the best first; supports that explain it alike are one cause."""
    if bool((found.values == 0).all()):
        return ["all log-probs are 0: missing ones were filled"]
    tried = ((cause, units, rms(units), rms(before)) for cause, units, before in _tried(found, rows, facts))
    fits = [
        (left, *cause) for cause, units, left, b in tried if len(units) > 1 and agrees(units) and left <= REDUCED * b
    ]
    if not fits:
        for name, score in facts.coarser.items():
            other = Difference(found.values, score()).units()
            if agrees(other) and rms(other) > 0.1:
                return [f"as far apart as the arithmetic of {name}"]
        return []
    least, out = min(left for left, *_ in fits), dict[str, list[str]]()
    for left, text, detail in sorted(fits):
        if left <= 2 * max(least, 0.5):
            out.setdefault(text, []).append(detail)
    return [f"{text} ({' or '.join(details)})" if details[0] else text for text, details in out.items()]


Cause = tuple[str, str]
"""Its name and, of one that comes in several sizes, the size."""


def _tried(found: Difference, rows: Rows, facts: Facts) -> Iterator[tuple[Cause, Tensor, Tensor]]:
    """(cause, the units that it leaves, the units before on the same tokens)."""
    own = found.own
    zero = (found.values == 0) & (own.logps < -LIMIT * own.units)
    if bool(zero.any()):
        text = f"{int(zero.sum())} of {len(zero)} log-probs are 0: missing ones were filled"
        yield (text, ""), found.units(of=~zero), found.units()
    for step, side in ((1, "before"), (-1, "after")):
        moved = torch.nn.functional.pad(rows.back(own.logps), (step, -step), value=math.nan)[rows.picked.cpu()]
        text = f"each log-prob belongs to the token {side} it"
        yield (text, ""), found.units(moved), found.units(of=moved.isfinite())
    picked = torch.zeros_like(own.logps, dtype=torch.bool)
    picked[own.sample] = True
    before = found.units(of=picked)
    if len(before) > 2:
        fitted = _fitted(found, facts, rows.token_ids[own.sample], picked)
        yield from ((cause, units, before) for cause, units in fitted)
    for name, ask in facts.others.items():
        yield (name, ""), found.units(ask()), found.units()


def _fitted(found: Difference, facts: Facts, ids: Tensor, picked: Tensor) -> Iterator[tuple[Cause, Tensor]]:
    """Causes that need the logits of the sample."""
    scores, tau = found.own, facts.temperature

    def units(logps: Tensor) -> Tensor:
        return found.units(scores.logps.masked_fill(~picked, math.nan).masked_scatter(picked, logps))

    def selected(logits: Tensor, temperature: float) -> Tensor:
        return (logits.double() / temperature).log_softmax(-1).gather(-1, ids[:, None])[:, 0]

    for name, logits in facts.head.items():
        yield (name, ""), units(selected(logits, tau))
    fitted = _minimum(lambda t: float(units(selected(scores.logits, t)).square().sum()))
    if abs(math.log(fitted / tau)) > 1e-3:
        raw = " (raw log-probs: none is applied)" if abs(fitted - 1) < 0.02 and tau != 1 else ""
        text = f"temperature {fitted:.4g}{raw} where the trainer's is {tau:.4g}"
        if not facts.sampled:
            text = f"logits {tau / fitted:.4g} times the model's own: a scale is left out, or the temperature is {fitted:.4g}"
        yield (text, ""), units(selected(scores.logits, fitted))
    if not facts.sampled:
        return
    all_logps = (scores.logits.double() / tau).log_softmax(-1)
    own, values = selected(scores.logits, tau), found.values[scores.sample]
    for top_p, top_k, min_p in dict.fromkeys((*facts.sampling, *SUPPORTS)):
        if (top_p, top_k, min_p) == (1.0, 0, 0.0):
            continue
        kept = [own - kept_mass(all_logps, ids, *near).log() for near in _near(top_p, top_k, min_p, scores.noise)]
        each = torch.stack(kept).masked_fill(torch.stack(kept).isposinf(), -math.inf)  # the token itself is cut
        best = each.gather(0, (each - values).abs().nan_to_num(math.inf).argmin(0, keepdim=True))[0]
        if bool(best.isfinite().all()):
            size = (
                [f"top-p {top_p:g}"] * (top_p < 1)
                + [f"top-k {top_k}"] * (top_k > 0)
                + [f"min-p {min_p:g}"] * (min_p > 0)
            )
            text = "the sampler's are of the tokens that it kept, the trainer's of all"
            yield (text, f"{' '.join(size)}: {float((own - best).exp().mean()):.2f} of the mass"), units(best)


def _near(top_p: float, top_k: int, min_p: float, noise: float) -> list[tuple[float, int, float]]:
    """A support, and those that rounding may make of it."""
    odds = math.log(top_p / (1 - top_p)) if top_p < 1 else math.inf
    by = [x * noise for x in (-BOUNDARY, 0.0, BOUNDARY)]
    return list(dict.fromkeys((1 / (1 + math.exp(-odds - x)), top_k, min(min_p * math.exp(x), 1.0)) for x in by))


def heads(model: Any, scores: Scores) -> dict[str, Tensor]:
    """The bare product of the LM head, if the model makes something else of it: what is left out then -> logits (m, V)."""
    inner = innermost(model)
    head, config = inner.get_output_embeddings(), inner.config.get_text_config()
    if scores.hidden is None or type(getattr(head, "weight", None)) is not torch.nn.Parameter:
        return {}  # not seen, or a shard
    with torch.no_grad():
        product = torch.nn.functional.linear(scores.hidden.to(head.weight.dtype), head.weight).float().cpu()
    said = [
        f"the {what} {getattr(config, n):g} of the logits"
        for what, names in NAMES.items()
        for n in names
        if _changes(config, n)
    ]
    said += ["the bias of the LM head"] * (getattr(head, "bias", None) is not None)
    where = "in hooks of" if head._forward_hooks or type(head) is not torch.nn.Linear else "to the logits behind"
    return {f"{' and '.join(said) or f'what the model does {where} its LM head'} is left out": product}


def _changes(config: Any, name: str) -> bool:
    return getattr(config, name, None) not in (None, 0, 1)


def _minimum(of: Callable[[float], float]) -> float:
    """The temperature in 0.05 to 20 at which `of` is least: a grid, then the golden section."""
    grid = [0.05 * 400 ** (i / 80) for i in range(81)]
    best = min(range(len(grid)), key=lambda i: of(grid[i]))
    low, high = math.log(grid[max(best - 1, 0)]), math.log(grid[min(best + 1, 80)])
    ratio = (5**0.5 - 1) / 2
    for _ in range(40):
        a, b = high - ratio * (high - low), low + ratio * (high - low)
        low, high = (low, b) if of(math.exp(a)) < of(math.exp(b)) else (a, high)
    return math.exp((low + high) / 2)


def farthest(found: Difference, rows: Rows, decode: Callable[[int], str], count: int = 5) -> list[dict[str, Any]]:
    """The tokens that differ most, with text, log-probs and units."""
    ids, units = rows.token_ids.tolist(), ((found.values - found.own.logps) / found.own.units).abs()
    order = units.nan_to_num(-1.0).argsort(descending=True)[:count].tolist()
    columns = {"logp": found.values, "own": found.own.logps, "units": units}
    return [{"token": decode(ids[i]), **{name: float(x[i]) for name, x in columns.items()}} for i in order]
