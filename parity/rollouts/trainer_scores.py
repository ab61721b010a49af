"""The trainer's log-probs of recorded tokens: as it computes them, and the same weights in float64."""

import dataclasses
from collections.abc import Callable, Sequence
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


def score(model: Any, rows: Rows, width: int, sampling: Sampling, batch: int = BATCH) -> Scores:
    """Log-probs of the completions of `rows` by `model`, zero behind a row's end.

    Temperature, then top-k, then top-p, as vLLM and transformers have it. Logits leave the model in its own dtype; the
    log-softmax is taken in float64, so that what differs is the model's own.

    Raises:
        UsageError: where a logit is NaN.
    """
    temperature, top_p, top_k = sampling
    full, kept = torch.zeros(len(rows), width, dtype=torch.float64), torch.ones(len(rows), width, dtype=torch.float64)
    for first in range(0, len(rows), batch):
        part = rows[first : first + batch]
        for i, logits in enumerate(_logits(model, part)):
            if bool(logits.isnan().any()):
                raise UsageError(f"row {first + i}: the trainer's logits are NaN")
            ids = torch.tensor(part[i][1], dtype=torch.long)
            logps = (logits.double() / temperature).log_softmax(-1)
            full[first + i, : len(ids)] = logps.gather(-1, ids[:, None])[:, 0]
            kept[first + i, : len(ids)] = kept_mass(logps, ids, top_p, top_k)
    return Scores(full, kept)


def _logits(model: Any, rows: Rows) -> list[Tensor]:
    """Of each row the logits that predict its completion, (T_i, V); padded at the left as TRL pads prompts."""
    width = max(len(p) + len(c) for p, c in rows)
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

    def score(self, rows: Rows, width: int, sampling: Sampling) -> Scores:
        """`score` of the model."""
        return score(self.change(engine_models.loaded(self.folder, self.dtype)), rows, width, sampling)

    def exact(self, rows: Rows, width: int, sampling: Sampling) -> Scores:
        """`score` of the same rounded weights in float64 arithmetic.

        A row stands alone: transformers masks padding with the lowest float64 and takes the softmax in float32, where a
        position that sees only padding is NaN, and so is whatever reads it.
        """
        model = self.change(engine_models.loaded(self.folder, self.dtype).double())
        return score(model, rows, width, sampling, batch=1)
