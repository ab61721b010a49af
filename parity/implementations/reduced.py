"""Reduced cross entropies: the log-prob of each position from a mean or a sum over labels."""

import dataclasses
from collections.abc import Callable

import torch

from parity.case.inputs import Inputs
from parity.families.head import IGNORE_INDEX
from parity.implementations import plain
from parity.implementations.implementation import Outputs, by_token
from parity.implementations.limits import only
from parity.judge.recipe import Recipe

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Of rows (N, H) and labels (N,)."""
ONE_BY_ONE = only(
    "a call for each of at most 8 positions, counted ones", lambda s: s.B * s.T <= 8 and s.ignored == "none"
)
REPEATED = 4
"""Rows that a position stands in, so that a mean counts more than one; a power of two divides without a rounding."""


def counted_rows(x: Inputs, reduction: str) -> int:
    """Of a position in a call; in float16 without a loss scale one: smallest gradients lose digits where they are divided."""
    digits = x.case.dtype != "fp16" or x.settings.cotangent == "scaled"
    return REPEATED if reduction == "mean" and digits else 1


def each_reduced(x: Inputs, loss: Loss, reduction: str) -> Outputs:
    """Minus a reduced loss of rows (N, H) and labels (N,) for each position in turn, all other rows ignored. Where a mean counts
    more than one row, the position stands in every second: the mean is its own by a divisor that is not 1, and counted rows
    are in more chunks than one."""
    rows, ids = plain.folded(x).flatten(0, 1), x.ids.flatten().long()
    order = torch.arange(len(ids), device=ids.device)
    if counted_rows(x, reduction) == 1:
        calls = [(rows, ids.where(order == i, IGNORE_INDEX)) for i in range(len(ids))]
    else:
        places = torch.arange(2 * REPEATED, device=ids.device)
        counted = places % 2 == 0
        chosen = [torch.where(counted, i, places % len(ids)) for i in range(len(ids))]
        calls = [(rows[at], ids[at].where(counted, IGNORE_INDEX)) for at in chosen]
    return {"logps": by_token(-torch.stack([loss(*call) for call in calls]), x)}


def class_weights(x: Inputs) -> torch.Tensor | None:
    """Of each token, (V,), in every second case: a mean of rows with one label divides by what it multiplied with.

    Powers of two, whose products are exact; with label smoothing, which weights all tokens, one of them.
    """
    if x.case.seed % 2 == 0:
        return None
    tokens = torch.arange(x.settings.V, device=x.hidden.device)
    return 2.0 ** (tokens % 3 - 1 if x.settings.smoothing == 0.0 else torch.ones_like(tokens))


def one_by_one(recipe: Recipe, x: Inputs, reduction: str) -> Recipe:
    """The recipe of a call for each position."""
    calls = x.settings.B * x.settings.T
    return dataclasses.replace(recipe, partials=counted_rows(x, reduction) * calls * recipe.partials)
