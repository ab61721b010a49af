"""Two processes against one: the window dealt out to ranks with unequal token counts, gradients reduced by DDP."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import SimpleNamespace

import torch

from parity.families import Setting
from parity.trainers import ranks, twin_runs
from parity.trainers.check import Cell, Result, check, holds
from parity.trainers.gradients import gradients
from parity.trainers.twins import SETTINGS, by_definition

LOSS = "dapo"
"""GRPO's loss here: the one whose normaliser counts the tokens of all ranks."""


@check(
    "processes",
    tuple(twin_runs.CLASSES),
    {"ranks": Setting(2, "processes, joined by gloo", (2,))},
    lambda profile, seed: [(t, {}) for t in twin_runs.CLASSES] if profile in ("nightly", "soak") else [],
    ways=("released",),
)
def processes(cell: Cell) -> Iterator[Result]:
    """The window dealt out to two ranks: both take the gradient of the whole window."""
    trainer = cell.case.family
    found = _launched(cell.settings.ranks)[trainer]
    wanted, got = sorted(twin_runs.expected(trainer)), sorted(s for rank in found for s in rank.sequences)
    yield holds("sequences", wanted == got, f"{len(got)} of {len(wanted)} sequences reached a rank", gate="exact")
    tokens = [sum(len(ids) - start for ids, start in rank.sequences) for rank in found]
    yield holds(
        "unequal ranks", len(set(tokens)) > 1, f"every rank has {tokens[0]} tokens: nothing is tested", gate="exact"
    )
    apart = [n for n, g in found[0].gradients.items() if not torch.equal(g, found[1].gradients[n])]
    yield holds("ranks", not apart, f"{len(apart)} gradients differ between the ranks, first {apart[:1]}", gate="exact")
    yield gradients(by_definition(trainer, _settings()), found[0].gradients)


@functools.cache
def _launched(count: int) -> dict[str, list[ranks.Rank]]:
    """Every trainer in one launch: importing them takes longer than training."""
    return ranks.launch(tuple(twin_runs.CLASSES), vars(_settings()), count)


def _settings() -> SimpleNamespace:
    plain = {name: setting.default for name, setting in SETTINGS.items()}
    return SimpleNamespace(**{**plain, "loss": LOSS, "split": "2x2"})
