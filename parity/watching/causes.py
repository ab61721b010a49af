"""What a difference of log-probs may come from: each cause fitted, named only where it explains the difference down to noise."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from parity.rollouts.judge import kept_mass
from parity.watching.own import FARTHEST, LIMIT, Own, Rows, Scores, innermost

REDUCED = 0.35
"""Share of the rms that a cause may leave."""
SUPPORTS = (
    *((p, 0) for p in (0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99)),
    *((1.0, k) for k in (1, 5, 10, 20, 40, 50, 64, 100)),
)
"""Top-p and top-k that are tried besides those of the run and of the model's generation config."""
SOFTCAPS = "final_logit_softcapping", "logits_soft_cap", "logit_softcap"
SCALES = "logit_scale", "output_multiplier", "lm_head_multiplier", "logits_scaling"
"""Names of what a transformers config says of logits."""
BOUNDARY = 2.0
"""Units within which rounding decides which tokens top-p keeps."""


@dataclasses.dataclass(frozen=True)
class Difference:
    """Log-probs (n,) against a model's own, in units of its noise; NaN: there is none."""

    values: Tensor
    own: Own

    @property
    def there(self) -> Tensor:
        """(n,) bool: which tokens have a log-prob."""
        return ~self.values.isnan()

    def units(self, against: Tensor | None = None, of: Tensor | None = None) -> Tensor:
        """Of the tokens `of` that have one, against the model's own log-probs or `against`."""
        exact = self.own.scores.logps if against is None else against
        chosen = self.there & exact.isfinite() if of is None else of & self.there & exact.isfinite()
        return ((self.values - exact) / self.own.units)[chosen]


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
        sampling: top-p and top-k of the run's config and of the model's generation config.
        head: other product of the LM head -> its logits (m, V) of the sample.
        others: other model -> its log-probs (n,); asked only if needed.
        coarser: narrower dtype -> the model's own scores with its noise.
    """

    temperature: float
    sampled: bool = True
    sampling: Sequence[tuple[float, int]] = ()
    head: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)
    others: Mapping[str, Callable[[], Tensor]] = dataclasses.field(default_factory=dict)
    coarser: Mapping[str, Callable[[], Own]] = dataclasses.field(default_factory=dict)


def explanations(found: Difference, rows: Rows, facts: Facts) -> list[str]:
    """The causes that explain the difference down to noise, the best first; supports that explain it alike are one cause."""
    if bool((found.values == 0).all()):
        return ["all log-probs are 0: missing ones were filled"]
    fits = [(rms(units), *cause) for cause, units, before in _tried(found, rows, facts) if _explains(units, before)]
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


def _explains(units: Tensor, before: Tensor) -> bool:
    return len(units) > 1 and agrees(units) and rms(units) <= REDUCED * rms(before)


Cause = tuple[str, str]
"""Its name and, of one that comes in several sizes, the size."""


def _tried(found: Difference, rows: Rows, facts: Facts) -> Iterator[tuple[Cause, Tensor, Tensor]]:
    """(cause, the units that it leaves, the units before on the same tokens)."""
    own, scores = found.own, found.own.scores
    zero = (found.values == 0) & (scores.logps < -LIMIT * own.units)
    if bool(zero.any()):
        text = f"{int(zero.sum())} of {len(zero)} log-probs are 0: missing ones were filled"
        yield (text, ""), found.units(of=~zero), found.units()
    for step, side in ((1, "before"), (-1, "after")):
        other = _moved(scores.logps, rows, step)
        yield (
            (f"each log-prob belongs to the token {side} it", ""),
            found.units(other),
            found.units(of=other.isfinite()),
        )
    picked = torch.zeros_like(found.there)
    picked[scores.sample] = True
    before, ids = found.units(of=picked), rows.token_ids[scores.sample]
    if len(before) > 2:
        yield from ((cause, units, before) for cause, units in _fitted(found, facts, ids, picked))
    for name, ask in facts.others.items():
        yield (name, ""), found.units(ask()), found.units()


def _fitted(found: Difference, facts: Facts, ids: Tensor, picked: Tensor) -> Iterator[tuple[Cause, Tensor]]:
    """Causes that need the logits of the sample."""
    scores, tau = found.own.scores, facts.temperature

    def units(logps: Tensor) -> Tensor:
        exact = scores.logps.new_full(picked.shape, math.nan)
        exact[scores.sample] = logps
        return found.units(exact)

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
    for top_p, top_k in dict.fromkeys((*facts.sampling, *SUPPORTS)):
        odds = math.log(top_p / (1 - top_p)) if top_p < 1 else math.inf
        near = [1 / (1 + math.exp(-odds - x * found.own.noise)) for x in (-BOUNDARY, 0.0, BOUNDARY)]
        mass = torch.stack([kept_mass(all_logps, ids, p, top_k) for p in dict.fromkeys(near)])
        kept = torch.where(mass > 0, own - mass.log(), -math.inf)
        best = kept.gather(0, (kept - values).abs().nan_to_num(math.inf).argmin(0, keepdim=True))[0]
        if (top_p, top_k) == (1.0, 0) or not bool(best.isfinite().all()):
            continue  # nothing is cut; the sampled token would have been
        size = " ".join([f"top-p {top_p:g}"] * (top_p < 1) + [f"top-k {top_k}"] * (top_k > 0))
        text = "the sampler's are of the tokens that it kept, the trainer's of all"
        yield (text, f"{size}: {float((own - best).exp().mean()):.2f} of the mass"), units(best)


def heads(model: Any, scores: Scores) -> dict[str, Tensor]:
    """What an LM head that leaves something out makes of the sample: cause -> logits (m, V)."""
    inner = innermost(model)
    head, config = inner.get_output_embeddings(), inner.config.get_text_config()
    if scores.hidden is None or type(getattr(head, "weight", None)) is not torch.nn.Parameter:
        return {}  # not seen, or a shard
    cap, scale = (_first(config, names) for names in (SOFTCAPS, SCALES))
    product = torch.nn.functional.linear(scores.hidden.to(head.weight.dtype), head.weight).float().cpu()
    bias = getattr(head, "bias", None)
    whole = product if bias is None else product + bias.float().cpu()

    def logits(z: Tensor, factor: float, cap: float | None = cap) -> Tensor:
        return cap * torch.tanh(z * factor / cap) if cap else z * factor

    def off(factor: float) -> float:
        return float((logits(whole, factor) - scores.logits).square().sum())

    factor = min(scale or 1.0, 1 / (scale or 1.0), key=off)  # some names divide, some multiply
    out = {}
    if cap:
        out[f"the softcap {cap:g} of the logits is left out"] = logits(whole, factor, None)
    if scale:
        out[f"the scale {scale:g} of the logits is left out"] = logits(whole, 1.0)
    if cap and scale:
        out["softcap and scale of the logits are left out"] = whole
    if bias is not None:
        out["the bias of the LM head is left out"] = logits(product, factor)
    if not cap and not scale:
        where = "in hooks of" if head._forward_hooks or type(head) is not torch.nn.Linear else "to the logits behind"
        out[f"what the model does {where} its LM head is left out"] = whole
    return out


def _first(config: Any, names: Sequence[str]) -> float | None:
    """The first of these settings that changes logits."""
    return next((float(s) for s in (getattr(config, n, None) for n in names) if s not in (None, 0, 1)), None)


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


def _moved(logps: Tensor, rows: Rows, step: int) -> Tensor:
    """The log-prob of the token `step` places earlier in the same row, NaN where none is in the loss."""
    picked = rows.picked.cpu()
    grid = logps.new_full(picked.shape, math.nan)
    grid[picked] = logps
    return torch.nn.functional.pad(grid, (step, -step), value=math.nan)[picked]


def farthest(found: Difference, rows: Rows, decode: Callable[[int], str], count: int = 5) -> list[dict[str, Any]]:
    """The tokens that differ most, with text, log-probs and units."""
    exact, ids = found.own.scores.logps, rows.token_ids.tolist()
    units = ((found.values - exact) / found.own.units).abs()
    order = units.nan_to_num(-1.0).argsort(descending=True)[:count].tolist()
    columns = {"logp": found.values, "own": exact, "units": units}
    return [{"token": decode(ids[i]), **{name: float(x[i]) for name, x in columns.items()}} for i in order]
