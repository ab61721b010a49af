"""A window of sequences by a model: log-probs of the tokens of each completion, and whatever losses and metrics make of them."""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from parity.trainers.rig import stored_window
from parity.trainers.rig.models import PAD
from parity.trainers.rig.stored_window import Sequences


def rows(sequences: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """`input_ids` and `attention_mask`, (N, T), of sequences padded on the right."""
    width = max(len(ids) for ids in sequences)
    return {
        "input_ids": torch.tensor([[*ids, *[PAD] * (width - len(ids))] for ids in sequences]),
        "attention_mask": torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids in sequences]),
    }


def logits(model: Any, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
    """Logits (T_i, V) of each sequence, one call: padded on the right, where a causal model cannot see it."""
    found = model(**rows(sequences), use_cache=False).logits
    return [found[i, : len(ids)] for i, ids in enumerate(sequences)]


class Scored:
    """What is asked of it is computed once, of N sequences with T_i tokens in their completions; vocabulary V.
    `reference`: the model that log-ratios are to, or the name of a saved one."""

    def __init__(self, model: Any, window: Sequences, reference: Any = "", temperature: float = 1.0):
        self.model, self.window, self.reference, self.temperature = model, window, reference, temperature
        self.completions = [torch.tensor(tokens[start:]) for tokens, start in window]
        self.lengths = torch.tensor([len(c) for c in self.completions], dtype=torch.float64)

    @functools.cached_property
    def logits(self) -> list[Tensor]:
        """Those that predict the tokens of each completion, (T_i, V)."""
        found = logits(self.model, [tokens for tokens, _ in self.window])
        return [z[start - 1 : -1] for z, (_, start) in zip(found, self.window, strict=True)]

    @functools.cached_property
    def tables(self) -> list[Tensor]:
        """Log-probs of the whole vocabulary, (T_i, V)."""
        return [torch.log_softmax(z / self.temperature, -1) for z in self.logits]

    @functools.cached_property
    def tokens(self) -> list[Tensor]:
        """log π of each token, (T_i,)."""
        pairs = zip(self.tables, self.completions, strict=True)
        return [table.gather(-1, tokens.unsqueeze(-1)).squeeze(-1) for table, tokens in pairs]

    @functools.cached_property
    def likeliest(self) -> list[Tensor]:
        """Whether each token is the likeliest of the vocabulary, (T_i,)."""
        return [table.argmax(-1) == tokens for table, tokens in zip(self.tables, self.completions, strict=True)]

    @functools.cached_property
    def sums(self) -> Tensor:
        """log π of each completion, (N,)."""
        return torch.stack([t.sum() for t in self.tokens])

    @functools.cached_property
    def means(self) -> Tensor:
        """The mean of each completion's tokens, (N,)."""
        return torch.stack([t.mean() for t in self.tokens])

    @functools.cached_property
    def base(self) -> "Scored":
        """The same by the reference, which has no gradients."""
        named = isinstance(self.reference, str)
        model = stored_window.reference(self.reference) if named else self.reference
        return Scored(model, self.window, temperature=self.temperature)

    def part(self, which: slice) -> "Scored":
        """Some of the sequences, in a row."""
        return _Part(self, which)

    @functools.cached_property
    def ratios(self) -> Tensor:
        """log π - log π_ref of each completion, (N,)."""
        return self.sums - self.base.sums

    @functools.cached_property
    def entropy(self) -> Tensor:
        """The mean over all tokens of -Σ π log π."""
        return entropies(torch.cat(self.tables)).mean()


class _Part(Scored):
    """Some sequences of a window, by the model calls of the whole."""

    def __init__(self, whole: Scored, which: slice):
        super().__init__(whole.model, whole.window[which], whole.reference, whole.temperature)
        self.whole, self.which = whole, which

    @functools.cached_property
    def logits(self) -> list[Tensor]:
        return self.whole.logits[self.which]

    @functools.cached_property
    def base(self) -> Scored:
        return _Part(self.whole.base, self.which)


def entropies(table: Tensor) -> Tensor:
    """-Σ p log p of each token, (T,), from log p (T, V)."""
    return -(table.exp() * table).sum(-1)


def completion_logps(model: Any, window: Sequences, temperature: float = 1.0) -> list[Tensor]:
    """Log-probs (T_i,) of the tokens of each completion."""
    return Scored(model, window, temperature=temperature).tokens
