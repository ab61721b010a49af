"""Two processes against one: ranks with unequal token counts, gradients reduced by DDP or FSDP2."""

from collections.abc import Iterator
from types import SimpleNamespace

import torch

from parity.case.inputs import Setting
from parity.errors import Unsupported
from parity.trainers.check import CheckCall, CheckCase, Quantity, check, holds, tells
from parity.trainers.checks.twins import by_definition, twin
from parity.trainers.definitions.training_step import gradients
from parity.trainers.rig import drawn, ranks
from parity.trainers.rig.ranks import Rank
from parity.trainers.rig.stored_window import Window
from parity.trainers.specs import SPECS, TWINS

RANKS = 2
LOSS = "dapo"
"""GRPO's loss here: the one whose normaliser counts the tokens of all ranks."""
SHARDINGS = {
    "none": "DDP",
    "fsdp2": "fully_shard over gloo, by accelerate's own code, also where accelerate would not shard on this device",
}
SETTINGS = {
    "sharding": Setting("none", "; ".join(f"{k}: {v}" for k, v in SHARDINGS.items()), tuple(SHARDINGS)),
    "model": Setting("llama", "tiny model; embeddings and head of qwen2 are one matrix", ("llama", "qwen2")),
}


def cases(seed: int) -> Iterator[CheckCase]:
    """Every trainer by DDP and FSDP2, and with one matrix that a wrapper must not take for two."""
    for settings in ({}, {"sharding": "fsdp2"}, {"sharding": "fsdp2", "model": "qwen2"}):
        yield from ((trainer, settings) for trainer in TWINS)


@check("processes", TWINS, SETTINGS, cases, paths=("released",), drives=False)
def processes(call: CheckCall) -> Iterator[Quantity]:
    """The window dealt out to two ranks: both take the gradient of the whole window."""
    trainer, s = call.case.family, call.settings
    found = _launched(s.sharding, s.model)[trainer]
    if found[0].failure.startswith(f"{Unsupported.__name__}: "):
        raise Unsupported(found[0].failure.partition(": ")[2])
    failed = [f"rank {i}: {rank.failure}" for i, rank in enumerate(found) if rank.failure]
    yield holds("trained", not failed, "; ".join(failed))
    if failed:
        return
    if s.sharding != "none":
        yield holds("sharded", bool(found[0].sharded), "no parameter is sharded", gate="exact")
    wanted, got = sorted(Window.of(trainer).expected), sorted(s for rank in found for s in rank.sequences)
    yield holds("sequences", wanted == got, f"{len(got)} of {len(wanted)} sequences reached a rank", gate="exact")
    tokens = [sum(len(ids) - start for ids, start in rank.sequences) for rank in found]
    yield tells("unequal ranks", len(set(tokens)) > 1, f"the ranks have {tokens} scored tokens")
    apart = [n for n, g in found[0].gradients.items() if not torch.equal(g, found[1].gradients[n])]
    yield holds("ranks", not apart, f"{len(apart)} gradients differ between the ranks, first {apart[:1]}", gate="exact")
    yield gradients(by_definition(trainer, settings(trainer, s.model)), found[0].gradients)


@drawn.once
def _launched(sharding: str, model: str) -> dict[str, list[Rank]]:
    """Every trainer in one launch: importing them takes longer than training."""
    return ranks.launch({t: vars(settings(t, model)) for t in TWINS}, sharding, RANKS)


def settings(trainer: str, model: str = "llama") -> SimpleNamespace:
    """A window of eight in two processes, accumulated where accumulating is not itself a finding."""
    return twin(trainer, model=model, loss=LOSS, split="2x2" if SPECS[trainer].accumulates else "4x1")
