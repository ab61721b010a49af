"""The trainer's log-probs of recorded tokens, under the two definitions of the support and with its own noise."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from parity.errors import UsageError
from parity.rollouts import models

Rows = Sequence[tuple[list[int], list[int]]]
BATCH = 16


@dataclasses.dataclass(frozen=True)
class Scoring:
    """How a trainer scores the same tokens: rows a batch, padding more than needed, attention, arithmetic."""

    batch: int = BATCH
    padding: int = 0
    attention: str = "eager"
    dtype: str = "same"


PLAIN = Scoring()
OTHERS = {
    "batch of one": Scoring(batch=1),
    "more padding": Scoring(padding=7),
    "sdpa attention": Scoring(attention="sdpa"),
    "float64 arithmetic": Scoring(batch=1, dtype="fp64"),
}
"""What a trainer may do otherwise without being wrong. The difference of each to `PLAIN` is the trainer's own noise.

In float64 a row stands alone: transformers masks padding with the lowest float64 and takes the softmax in float32, where a
position that sees only padding is NaN, and so is whatever reads it."""
SAME = 1e-4
"""Nats between two computations of one function in float64 weights: transformers' eager softmax stays float32, which costs up
to 3e-6 on the shipped recordings; a lost softcap costs 0.7."""


@dataclasses.dataclass(frozen=True)
class Scores:
    """(B, T) float64 each: log-prob over the whole vocabulary, and the kept mass under top-p and top-k (0: token cut)."""

    full: Tensor
    kept: Tensor

    @property
    def truncated(self) -> Tensor:
        """log p - log K within the kept set, the log-prob of truncated sampling; -inf outside."""
        return torch.where(self.kept > 0, self.full - self.kept.log(), -torch.inf)


def score(
    model: Any, rows: Rows, width: int, temperature: float, top_p: float = 1.0, top_k: int = 0, scoring: Scoring = PLAIN
) -> Scores:
    """Log-probs of the completions of `rows` by `model`, zero behind a row's end.

    Temperature, then top-k, then top-p, as vLLM and transformers have it. Logits leave the model in its own dtype; the
    log-softmax is taken in float64, so that what differs is the model's own.

    Raises:
        UsageError: where a logit is NaN.
    """
    full, kept = torch.zeros(len(rows), width, dtype=torch.float64), torch.ones(len(rows), width, dtype=torch.float64)
    for first in range(0, len(rows), scoring.batch):
        part = rows[first : first + scoring.batch]
        for i, logits in enumerate(_logits(model, part, scoring)):
            if bool(logits.isnan().any()):
                raise UsageError(f"row {first + i}: the trainer's logits are NaN")
            ids = torch.tensor(part[i][1], dtype=torch.long)
            logps = (logits.double() / temperature).log_softmax(-1)
            full[first + i, : len(ids)] = logps.gather(-1, ids[:, None])[:, 0]
            kept[first + i, : len(ids)] = kept_mass(logps, ids, top_p, top_k)
    return Scores(full, kept)


def _logits(model: Any, rows: Rows, scoring: Scoring) -> list[Tensor]:
    """Of each row the logits that predict its completion, (T_i, V); padded at the left as TRL pads prompts."""
    width = max(len(p) + len(c) for p, c in rows) + scoring.padding
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    mask = torch.zeros(len(rows), width, dtype=torch.long)
    for i, (prompt, completion) in enumerate(rows):
        whole = torch.tensor(prompt + completion)
        ids[i, width - len(whole) :], mask[i, width - len(whole) :] = whole, 1
    device = model.device
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        out = model(input_ids=ids.to(device), attention_mask=mask.to(device), position_ids=positions.to(device)).logits
    return [out[i, width - len(c) - 1 : width - 1].cpu() for i, (_, c) in enumerate(rows)]


def kept_mass(logps: Tensor, ids: Tensor, top_p: float, top_k: int) -> Tensor:
    """Probability that top-k and top-p keep, (T,), from log-probs (T, V); 0 where the token itself is cut.

    Top-p keeps the fewest likeliest tokens whose mass reaches p, of what top-k left.
    """
    order = logps.argsort(dim=-1, descending=True, stable=True)
    probs = logps.gather(-1, order).exp()
    if top_k > 0:
        probs = torch.where(torch.arange(probs.shape[-1]) < top_k, probs, 0.0)
    mass = probs.sum(-1, keepdim=True)
    before = (probs / mass).cumsum(-1) - probs / mass
    keep = (probs > 0) & ((before < top_p) | (top_p >= 1))
    rank = (order == ids[:, None]).double().argmax(-1, keepdim=True)
    kept = (probs * keep).sum(-1)
    return torch.where(keep.gather(-1, rank)[:, 0], kept, 0.0)


@dataclasses.dataclass(frozen=True)
class Trainer:
    """The model whose log-probs the sampler's are held against.

    Attributes:
        folder: where the model lies.
        dtype: of its weights and arithmetic.
        change: what happens to the model after it is loaded: an adapter, a step of training.
    """

    folder: Path
    dtype: torch.dtype
    change: Callable[[Any], Any] = lambda model: model

    def score(self, rows: Rows, width: int, sampling: tuple[float, float, int], scoring: Scoring = PLAIN) -> Scores:
        """`score` of the model at (temperature, top-p, top-k), as `scoring` says."""
        model = models.loaded(self.folder, self.dtype, scoring.attention)
        if scoring.dtype == "fp64":  # the same rounded weights, exact arithmetic
            model = model.double()
        return score(self.change(model), rows, width, *sampling, scoring=scoring)

    def scorings(self, rows: Rows, width: int) -> dict[str, Scoring]:
        """Those of `OTHERS` that compute the model's own function: in float64 they agree on the first `rows`.

        transformers 5.19 runs Gemma-2 with sdpa and drops the softcap on its attention scores: that is no rounding, and a
        unit of that size would pass anything. Releases that refuse it say so in the class.
        """
        return {n: one for n, one in OTHERS.items() if one.attention == "eager" or self._same(rows, width, one)}

    def _same(self, rows: Rows, width: int, scoring: Scoring) -> bool:
        if not models.has_sdpa(self.folder):
            return False
        alone = dataclasses.replace(scoring, batch=1, dtype="fp64")
        exact, other = (
            self.score(rows[:4], width, (1.0, 1.0, 0), w).full for w in (OTHERS["float64 arithmetic"], alone)
        )
        return bool((exact - other).abs().max() < SAME)
