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


def counted_rows(x: Inputs) -> int:
    """Of a position in a mean: one in float16, whose smallest gradients lose digits where they are divided."""
    return 1 if x.case.dtype == "fp16" else REPEATED


def each_alone(x: Inputs, loss: Loss) -> Outputs:
    """Minus a reduced loss of rows (N, H) and labels (N,) of which all but one are ignored, for each in turn."""
    rows, ids = plain.folded(x).flatten(0, 1), x.ids.flatten().long()
    alone = [ids.where(torch.arange(len(ids), device=ids.device) == i, IGNORE_INDEX) for i in range(len(ids))]
    return {"logps": by_token(-torch.stack([loss(rows, labels) for labels in alone]), x)}


def each_repeated(x: Inputs, loss: Loss) -> Outputs:
    """Minus a mean loss of rows and labels, for each position in turn: it stands in every second row, the others are
    ignored. So the mean is the position's own, by a divisor that is not 1, and counted rows are in more chunks than one."""
    if counted_rows(x) == 1:
        return each_alone(x, loss)
    rows, ids = plain.folded(x).flatten(0, 1), x.ids.flatten().long()
    order = torch.arange(2 * REPEATED, device=ids.device)
    counted = order % 2 == 0
    chosen = [torch.where(counted, i, order % len(ids)) for i in range(len(ids))]
    means = [loss(rows[at], ids[at].where(counted, IGNORE_INDEX)) for at in chosen]
    return {"logps": by_token(-torch.stack(means), x)}


def one_by_one(recipe: Recipe, x: Inputs, rows: int = 1) -> Recipe:
    """The recipe of a call for each position, which counts so many rows."""
    calls = x.settings.B * x.settings.T
    return dataclasses.replace(recipe, partials=rows * calls * recipe.partials)
