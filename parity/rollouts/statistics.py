"""What the log-ratios of an engine look like: d = trainer's log-prob minus the sampler's, of each sampled token."""

import dataclasses
import itertools
import math
from collections.abc import Mapping

import torch
from torch import Tensor

QUANTILES = (0.5, 0.9, 0.99, 1.0)
NEAR = (0.9, 1.1)
PROBABILITIES = (0.0, 1e-3, 1e-2, 0.1, 0.5, 1.0)
STRETCHES = 4
"""Equal parts of the longest completion, for the table by position."""


@dataclasses.dataclass(frozen=True)
class Statistics:
    """Of n finite d in nats.

    Attributes:
        tokens, unscored, cut: the tokens judged; those the sampler has no log-prob for; those that the trainer's top-p or
            top-k excludes.
        quantiles: of |d|, at `QUANTILES`.
        rms, mean: √mean d², mean d.
        outside: share of ratios exp(d) outside `NEAR`.
        mean_ratio: mean exp(d). It is 1 for any trainer whatsoever in the limit of many samples, so it judges nothing.
        k3: mean exp(d) - d - 1, an estimate of KL(sampler ‖ trainer).
        ess, ess_sequences: (Σ r)² / (n Σ r²) of token ratios, and of the products of each sequence.
        by_position, by_probability: label -> (tokens, rms).
    """

    tokens: int
    unscored: int
    cut: int
    quantiles: tuple[float, ...]
    rms: float
    mean: float
    outside: float
    mean_ratio: float
    k3: float
    ess: float
    ess_sequences: float
    by_position: Mapping[str, tuple[int, float]]
    by_probability: Mapping[str, tuple[int, float]]


def rms(values: Tensor) -> float:
    """√mean x², 0 of nothing."""
    return float(values.square().mean().sqrt()) if values.numel() else 0.0


def statistics(d: Tensor, mask: Tensor, sampler: Tensor) -> Statistics:
    """`Statistics` of d (B, T) under the mask (B, T); sampler (B, T) are the sampler's log-probs."""
    scored = mask & ~d.isnan()
    finite = scored & d.isfinite()
    values = d[finite]
    ratios = values.exp()
    sums = torch.where(finite, d, 0.0).sum(-1)[finite.any(-1)]
    n = max(len(values), 1)
    return Statistics(
        tokens=len(values),
        unscored=int((mask & d.isnan()).sum()),
        cut=int((scored & ~d.isfinite()).sum()),
        quantiles=tuple(values.abs().quantile(torch.tensor(QUANTILES, dtype=d.dtype)).tolist())
        if len(values)
        else (math.nan,) * len(QUANTILES),
        rms=rms(values),
        mean=float(values.sum() / n),
        outside=float(((ratios < NEAR[0]) | (ratios > NEAR[1])).sum() / n),
        mean_ratio=float(ratios.sum() / n),
        k3=float((torch.expm1(values) - values).sum() / n),
        ess=_share(values),
        ess_sequences=_share(sums),
        by_position={label: (int(part.sum()), rms(d[part])) for label, part in stretches(finite)},
        by_probability=_by_probability(d, finite, sampler),
    )


def stretches(finite: Tensor) -> list[tuple[str, Tensor]]:
    """("1-8", (B, T) bool), … : the tokens of each part of the positions."""
    width = finite.shape[1]
    ends = sorted({round(width * k / STRETCHES) for k in range(STRETCHES + 1)})
    at = torch.arange(width)
    return [(f"{a + 1}-{b}", finite & (at >= a) & (at < b)) for a, b in itertools.pairwise(ends)]


def _by_probability(d: Tensor, finite: Tensor, sampler: Tensor) -> dict[str, tuple[int, float]]:
    p = sampler.exp()
    parts = {f"{a:g}-{b:g}": finite & (p > a) & (p <= b) for a, b in itertools.pairwise(PROBABILITIES)}
    return {label: (int(part.sum()), rms(d[part])) for label, part in parts.items()}


def _share(logs: Tensor) -> float:
    """Effective sample size as a share of n, of weights exp(logs)."""
    if not len(logs):
        return math.nan
    return float((2 * logs.logsumexp(0) - (2 * logs).logsumexp(0)).exp() / len(logs))
