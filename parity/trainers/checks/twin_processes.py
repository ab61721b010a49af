"""Two processes against one: ranks with unequal token counts, gradients reduced by DDP, FSDP2 or ZeRO-3."""

import dataclasses
import functools
import importlib.util
from collections.abc import Iterator, Sequence
from types import SimpleNamespace

import torch

from parity.case.inputs import Setting
from parity.errors import Unsupported
from parity.trainers.check import CheckCall, CheckCase, CheckResult, by_profile, check, holds
from parity.trainers.checks.twins import SPLIT, by_definition, plain_twin
from parity.trainers.definitions import twin_losses
from parity.trainers.definitions.gradients import gradients
from parity.trainers.definitions.training_step import ExactStep
from parity.trainers.rig import ranks, stored_window, twin_runs
from parity.trainers.rig.ranks import Plan, Rank
from parity.trainers.rig.stored_window import Row

LOSS = "dapo"
"""GRPO's loss here: the one whose normaliser counts the tokens of all ranks."""

SHARDINGS = {
    "none": "DDP",
    "fsdp2": "fully_shard over gloo, by accelerate's own code, also where accelerate would not shard on this device",
    "configured": "fsdp='full_shard' in the config and no more",
    "zero3": "DeepSpeed's ZeRO-3, every parameter in shards",
}
MODELS = ("llama", "qwen2")
"""The second has one matrix for embeddings and head, which a wrapper must not take for two."""


@by_profile()
def cases(seed: int) -> Iterator[CheckCase]:
    """Every trainer, sharded and not, and with a rank that has no token where its batching can deal so."""
    for sharding in ("none", "fsdp2"):
        for tokens in ("unequal", "none"):
            yield from ((t, {"sharding": sharding, "tokens": tokens}) for t in twin_runs.TWINS)
    yield from ((t, {"sharding": "fsdp2", "model": "qwen2"}) for t in twin_runs.TWINS)
    yield "sft-trainer", {"sharding": "configured"}
    yield from ((t, {"sharding": "zero3"}) for t in twin_runs.TWINS)
    yield "sft-trainer", {"sharding": "zero3", "model": "qwen2"}


@check(
    "processes",
    twin_runs.TWINS,
    {
        "ranks": Setting(2, "processes, joined by gloo", (2,)),
        "sharding": Setting("none", "; ".join(f"{k}: {v}" for k, v in SHARDINGS.items()), tuple(SHARDINGS)),
        "model": Setting("llama", "tiny model; qwen2 is tied", MODELS),
        "tokens": Setting("unequal", "scored tokens of the ranks: unequal, or none on the second", ("unequal", "none")),
    },
    cases,
    paths=("released",),
    drives=False,
)
def processes(call: CheckCall) -> Iterator[CheckResult]:
    """The window dealt out to two ranks: both take the gradient of the whole window."""
    trainer, s = call.case.family, call.settings
    if s.sharding == "zero3" and importlib.util.find_spec("deepspeed") is None:
        raise Unsupported("deepspeed is not installed: pip install deepspeed")
    part = _rows(trainer, s.ranks, s.tokens)
    found = _launched(s.ranks, s.sharding, s.tokens, s.model)[trainer]
    if found[0].failure.startswith(f"{Unsupported.__name__}: "):
        raise Unsupported(found[0].failure.partition(": ")[2])
    failed = [f"rank {i}: {rank.failure}" for i, rank in enumerate(found) if rank.failure]
    yield holds("trained", not failed, "; ".join(failed))
    if failed:
        return
    if s.sharding == "configured" and not found[0].sharded:
        raise Unsupported(
            f"{_accelerate()} on {call.device} trains as {found[0].kind} and says nothing: nothing is sharded"
        )
    if s.sharding != "none":
        yield holds("sharded", bool(found[0].sharded), f"no parameter is sharded: {found[0].kind}", gate="exact")
    wanted, got = sorted(twin_runs.expected(trainer, part)), sorted(s for rank in found for s in rank.sequences)
    yield holds("sequences", wanted == got, f"{len(got)} of {len(wanted)} sequences reached a rank", gate="exact")
    tokens = [sum(len(ids) - start for ids, start in rank.sequences) for rank in found]
    unequal = len(set(tokens)) > 1 and (s.tokens == "unequal" or tokens[1] == 0)
    yield holds("unequal ranks", unequal, f"the ranks have {tokens} scored tokens: nothing is tested", gate="exact")
    apart = [n for n, g in found[0].gradients.items() if not torch.equal(g, found[1].gradients[n])]
    yield holds("ranks", not apart, f"{len(apart)} gradients differ between the ranks, first {apart[:1]}", gate="exact")
    yield gradients(_step(trainer, s.tokens, s.model, part), found[0].gradients)


def _accelerate() -> str:
    import accelerate

    return f"accelerate {accelerate.__version__}"


def _rows(trainer: str, count: int, tokens: str) -> tuple[Row, ...]:
    """The window, the rows that the sampler deals to the second rank not counted where it is to have no token."""
    rows = twin_runs.rows(trainer)
    bare = _dealt(trainer, count) if tokens == "none" else ()
    return tuple(stored_window.without(rows, bare))


def _dealt(trainer: str, count: int) -> tuple[int, ...]:
    """The rows that the second rank gets: looked up in a run in which all are counted.

    Raises:
        Unsupported: where the trainer's batching has no way to a sequence without a scored token, or where the sampler
            deals a part of a group.
    """
    rows = twin_runs.rows(trainer)
    twin_runs.uncounted(trainer, [dataclasses.replace(row, counted=False) for row in rows])
    received = _launched(count, "none", "unequal", MODELS[0])[trainer][1].sequences
    out = tuple(i for i, s in enumerate(twin_runs.expected(trainer)) if s in received)
    groups = {rows[i].prompt for i in out}
    if trainer != "sft-trainer" and len(out) != len(groups) * stored_window.GENERATIONS:
        raise Unsupported(f"the second rank holds rows {out}: a part of a group")
    return out


@functools.lru_cache(maxsize=2)
def _step(trainer: str, tokens: str, model: str, part: Sequence[Row]) -> ExactStep:
    settings = _settings(trainer, model)
    if tokens == "unequal":
        return by_definition(trainer, settings)
    return ExactStep(stored_window.policy(model, torch.float64), twin_losses.definition(trainer, settings, part))


@functools.cache
def _launched(count: int, sharding: str, tokens: str, model: str) -> dict[str, list[Rank]]:
    """Every trainer in one launch: importing them takes longer than training."""
    trainers, bare = twin_runs.TWINS, {}
    if sharding == "configured":
        trainers = ("sft-trainer",)
    if tokens == "none":
        trainers = tuple(t for t in trainers if _can_be_bare(t))
        bare = {t: _dealt(t, count) for t in trainers}
    return ranks.launch(Plan({t: vars(_settings(t, model)) for t in trainers}, bare, sharding), count)


def _can_be_bare(trainer: str) -> bool:
    try:
        twin_runs.uncounted(trainer, [dataclasses.replace(row, counted=False) for row in twin_runs.rows(trainer)])
    except Unsupported:
        return False
    return True


def _settings(trainer: str, model: str = MODELS[0]) -> SimpleNamespace:
    """A window of eight in two processes, accumulated where accumulating is not itself a finding."""
    return plain_twin(model=model, loss=LOSS, split="4x1" if trainer in SPLIT else "2x2")
