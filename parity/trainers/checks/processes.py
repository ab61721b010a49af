"""One optimizer window of stored data dealt out to two processes: the gradients are those of the whole window, reduced by DDP
or FSDP2, and what is logged is of the whole batch."""

import functools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

from parity.case.inputs import Setting, defaults
from parity.errors import Unsupported
from parity.judge.oracle import Oracle
from parity.trainers.check import CheckCall, CheckCase, Quantity, check, holds, same, shared, tells
from parity.trainers.checks import distillation, metrics
from parity.trainers.checks.twins import twin
from parity.trainers.definitions.formulas import Loss
from parity.trainers.definitions.training_step import exact_step, gradients, logged, measured
from parity.trainers.rig import drawn, ranks, stored_window
from parity.trainers.rig.ranks import Rank
from parity.trainers.rig.stored_window import Window
from parity.trainers.rig.twin_runs import Run
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
    "even": Setting(
        False, "ranks with equal token counts, each counting its own (average_tokens_across_devices off)", (False, True)
    ),
}
ALL = (*TWINS, *distillation.LOCAL, "cpo-trainer", "orpo-trainer", "tpo-trainer")
LOGGING = [t for t in TWINS if t in metrics.TRAINERS and SPECS[t].generates != "model"]
"""Those whose metrics are judged; online DPO's count padding, which one process shows."""


def process_cases(seed: int) -> Iterator[CheckCase]:
    """Every trainer by DDP and FSDP2, and with one matrix that a wrapper must not take for two; then on even ranks."""
    for settings in ({}, {"sharding": "fsdp2"}, {"sharding": "fsdp2", "model": "qwen2"}, {"even": True}):
        yield from ((trainer, settings) for trainer in ALL)


@check("processes", ALL, PROCESSES, process_cases, drives=False)
def processes(call: CheckCall) -> Iterator[Quantity]:
    """The window dealt out to two ranks: both take the gradient of the whole window."""
    trainer, s = call.case.family, call.settings
    found = _launched(s.sharding, s.model, s.even, call.path)[trainer]
    if found[0].failure.startswith(f"{Unsupported.__name__}: "):
        raise Unsupported(found[0].failure.partition(": ")[2])
    failed = [f"rank {i}: {rank.failure}" for i, rank in enumerate(found) if rank.failure]
    yield holds("trained", not failed, "; ".join(failed))
    if failed:
        return
    if s.sharding != "none":
        yield holds("sharded", bool(found[0].sharded), "no parameter is sharded")
    run = run_of(trainer, of_processes(trainer, s.model, s.even))
    yield same([s for rank in found for s in rank.sequences], run.window.expected)
    tokens = [sum(len(ids) - start for ids, start in rank.sequences) for rank in found]
    yield tells(
        "even ranks" if s.even else "unequal ranks", (len(set(tokens)) == 1) is s.even, f"scored tokens: {tokens}"
    )
    apart = [n for n, g in found[0].gradients.items() if not torch.equal(g, found[1].gradients[n])]
    yield holds("ranks", not apart, f"{len(apart)} gradients differ between the ranks, first {apart[:1]}")
    step = shared(call, "step", lambda: _step(run, found))
    yield gradients(step, found[0].gradients)
    if trainer in LOGGING and s.sharding == "none" and s.model == "llama" and not s.even:
        define = functools.partial(metrics.define, Window.of(trainer), of_metrics(trainer))
        policy = functools.partial(stored_window.policy, s.model, torch.float64)
        truth = shared(call, "logged", lambda: measured(policy(), define, metrics.COUNTED))
        together = _metrics(call.path)[trainer][0]
        yield holds("logged", not together.failure, together.failure)
        yield from logged(truth, together.log, "what both ranks log together")


BUILD = f"{__name__}:build"


def build(trainer: str, s: SimpleNamespace, path: str, **config: Any) -> Any:
    """The trainer of one rank."""
    return run_of(trainer, s, path, average_tokens_across_devices=not s.even, **config).built


def run_of(trainer: str, s: SimpleNamespace, path: str = "released", **config: Any) -> Run:
    if trainer in distillation.LOCAL:
        return distillation.Control(trainer, s, path, **config)
    rows = Window.of(trainer).rows
    return Run(trainer, s, path, stored_window.even(rows) if s.even else rows, **config)


@drawn.once
def _launched(sharding: str, model: str, even: bool, path: str) -> dict[str, list[Rank]]:
    """Every trainer in one launch: importing them takes longer than training."""
    return ranks.launch(BUILD, {t: vars(of_processes(t, model, even)) for t in ALL}, sharding, RANKS, path)


@drawn.once
def _metrics(path: str) -> dict[str, list[Rank]]:
    """What trainers log of one batch of eight, four for each rank, all in one launch."""
    return ranks.launch(BUILD, {t: vars(of_metrics(t)) for t in LOGGING}, "none", RANKS, path)


def of_metrics(trainer: str) -> SimpleNamespace:
    """One micro-batch for each rank, with a KL to log."""
    kl = SPECS[trainer].data == "labels"
    return twin(trainer, beta=0.3, split="4x1", ranks=RANKS, kl=kl, even=False)


def of_processes(trainer: str, model: str = "llama", even: bool = False) -> SimpleNamespace:
    """A window of eight in two processes, accumulated where accumulating is not itself a finding; two in distillation."""
    if trainer in distillation.LOCAL:
        own = {"split": "1x1", "model": model, "even": even, "prompts": "even" if even else "equal"}
        return SimpleNamespace(**defaults(distillation.RAGGED) | own)
    return twin(trainer, model=model, loss=LOSS, even=even, split="2x2" if SPECS[trainer].accumulates else "4x1")


def _step(run: Run, found: list[Rank]) -> Oracle:
    if isinstance(run, distillation.Control):
        return run.definition([rank.sequences for rank in found], not found[0].counted)
    return exact_step(stored_window.policy(run.s.model, torch.float64), Loss(run.window, run.s))
