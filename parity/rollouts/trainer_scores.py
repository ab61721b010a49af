"""The trainer's log-probs of recorded tokens: as it computes them, and the same weights in float64."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from parity.errors import UsageError
from parity.rollouts import engine_models

Rows = Sequence[tuple[list[int], list[int]]]
Sampling = tuple[float, float, int]
"""Temperature, top-p (1: none), top-k (0: none)."""
BATCH = 16


@dataclasses.dataclass(frozen=True)
class Scores:
    """(B, T) float64 each: log-prob over the whole vocabulary, and the kept mass under top-p and top-k (0: token cut)."""

    full: Tensor
    kept: Tensor

    @property
    def truncated(self) -> Tensor:
        """log p - log K within the kept set, the log-prob of truncated sampling; -inf outside."""
        return torch.where(self.kept > 0, self.full - self.kept.log(), -torch.inf)


def score(model: Any, rows: Rows, width: int, sampling: Sampling) -> Scores:
    """Log-probs of the completions of `rows` by `model`, zero behind a row's end.

    Temperature, then top-k, then top-p, as vLLM and transformers have it. Logits leave the model in its own dtype; the
    log-softmax is taken in float64, so that what differs is the model's own.

    Raises:
        UsageError: where a logit is NaN.
    """
    temperature, top_p, top_k = sampling
    full, kept = torch.zeros(len(rows), width, dtype=torch.float64), torch.ones(len(rows), width, dtype=torch.float64)
    lengths = torch.tensor([len(completion) for _, completion in rows])
    with torch.no_grad():
        for place, ids, logits in predictions(model, rows, torch.arange(width) < lengths[:, None]):
            broken = logits.isnan().any(-1)
            if bool(broken.any()):
                raise UsageError(f"row {int(place[0][broken][0])}: the trainer's logits are NaN")
            logps = (logits.cpu().double() / temperature).log_softmax(-1)
            full[place] = logps.gather(-1, ids[:, None])[:, 0]
            kept[place] = kept_mass(logps, ids, top_p, top_k)
    return Scores(full, kept)


def predictions(model: Any, rows: Rows, wanted: Tensor) -> Iterator[tuple[tuple[Tensor, Tensor], Tensor, Tensor]]:
    """Of the `wanted` tokens of completions (B, T), a batch of rows at a time: place (row and position), ids (n,) and the logits
    that predict them (n, V). A row stands at the left of its batch, where it needs no mask."""
    for first in range(0, len(rows), BATCH):
        part = [p + c for p, c in rows[first : first + BATCH]]
        ids = torch.zeros(len(part), max(map(len, part)), dtype=torch.long)
        for i, tokens in enumerate(part):
            ids[i, : len(tokens)] = torch.tensor(tokens)
        row, position = wanted[first : first + BATCH].nonzero(as_tuple=True)
        if len(row):
            at = torch.tensor([len(p) for p, _ in rows[first : first + BATCH]])[row] + position
            logits = model(input_ids=ids.to(model.device)).logits
            yield (row + first, position), ids[row, at], logits[row, at - 1]


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

    def score(self, rows: Rows, width: int, sampling: Sampling) -> Scores:
        """`score` of the model."""
        return score(self.change(engine_models.loaded(self.folder, self.dtype)), rows, width, sampling)

    def in_float64(self) -> Any:
        """The model with the same rounded weights, for arithmetic in float64."""
        return self.change(engine_models.loaded(self.folder, self.dtype).double())
