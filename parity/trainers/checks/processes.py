"""One optimizer window of stored data dealt out to two processes, ranks with unequal token counts: the gradients are those of
the whole window, reduced by DDP or FSDP2, and what is logged is of the whole batch."""

import functools
from collections.abc import Iterator
from types import SimpleNamespace

import torch

from parity.case.inputs import Setting
from parity.errors import Unsupported
from parity.trainers.check import CheckCall, CheckCase, Quantity, check, holds, tells
from parity.trainers.checks import metrics
from parity.trainers.checks.twins import by_definition, twin
from parity.trainers.definitions.training_step import gradients, logged, measured
from parity.trainers.rig import drawn, ranks, stored_window
from parity.trainers.rig.ranks import Rank
from parity.trainers.rig.stored_window import Window
from parity.trainers.specs import SPECS, TWINS

RANKS = 2
LOSS = "dapo"
"""GRPO's loss in `processes`: the one whose normaliser counts the tokens of all ranks."""
SHARDINGS = {
    "none": "DDP",
    "fsdp2": "fully_shard over gloo, by accelerate's own code, also where accelerate would not shard on this device",
}
PROCESSES = {
    "sharding": Setting("none", "; ".join(f"{k}: {v}" for k, v in SHARDINGS.items()), tuple(SHARDINGS)),
    "model": Setting("llama", "tiny model; embeddings and head of qwen2 are one matrix", ("llama", "qwen2")),
}
LOGGING = [t for t in TWINS if t in metrics.TRAINERS and SPECS[t].generates != "model"]
"""Those whose metrics are judged; online DPO's count padding, which one process shows."""


def process_cases(seed: int) -> Iterator[CheckCase]:
    """Every trainer by DDP and FSDP2, and with one matrix that a wrapper must not take for two."""
    for settings in ({}, {"sharding": "fsdp2"}, {"sharding": "fsdp2", "model": "qwen2"}):
        yield from ((trainer, settings) for trainer in TWINS)


@check("processes", TWINS, PROCESSES, process_cases, paths=("released",), drives=False)
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
    yield gradients(by_definition(trainer, of_processes(trainer, s.model)), found[0].gradients)
    if trainer in LOGGING and s.sharding == "none" and s.model == "llama":
        define = functools.partial(metrics.define, Window.of(trainer), of_metrics(trainer))
        truth = measured(stored_window.policy(s.model, torch.float64), define, metrics.COUNTED)
        together = _metrics()[trainer][0]
        yield holds("logged", not together.failure, together.failure)
        yield from logged(truth, together.log, "what both ranks log together")


@drawn.once
def _launched(sharding: str, model: str) -> dict[str, list[Rank]]:
    """Every trainer in one launch: importing them takes longer than training."""
    return ranks.launch({t: vars(of_processes(t, model)) for t in TWINS}, sharding, RANKS)


@drawn.once
def _metrics() -> dict[str, list[Rank]]:
    """What trainers log of one batch of eight, four for each rank, all in one launch."""
    return ranks.launch({t: vars(of_metrics(t)) for t in LOGGING}, "none", RANKS)


def of_metrics(trainer: str) -> SimpleNamespace:
    """One micro-batch for each rank, with a KL to log."""
    return twin(trainer, beta=0.3, split="4x1", ranks=RANKS, kl=SPECS[trainer].data == "labels")


def of_processes(trainer: str, model: str = "llama") -> SimpleNamespace:
    """A window of eight in two processes, accumulated where accumulating is not itself a finding."""
    return twin(trainer, model=model, loss=LOSS, split="2x2" if SPECS[trainer].accumulates else "4x1")
