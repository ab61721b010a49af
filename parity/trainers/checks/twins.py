"""Twins: runs of a real trainer that must give the same gradients, each judged against the definition in float64.

A twin differs from the plain run in one thing that has no place in the loss: how the window is cut into micro-batches,
where the padding stands, whether activations are checkpointed. What is judged is one optimizer window of stored data,
eight sequences of unequal lengths that go in through a dataset and come out of the trainer's own batching.
"""

import functools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

from parity.case.inputs import Setting, defaults
from parity.judge.oracle import Oracle
from parity.trainers.check import CheckCall, CheckCase, Quantity, by_profile, check, holds
from parity.trainers.definitions import first_divergence, twin_losses
from parity.trainers.definitions.gradients import finite, gradients, window_loss
from parity.trainers.definitions.step_rounding import AutocastRounding, StepRounding
from parity.trainers.definitions.training_step import exact_step
from parity.trainers.rig import drive, stored_window, twin_runs
from parity.trainers.specs import JUDGED, SPECS

SPLITS = ("8x1", "4x2", "2x4", "1x8")
LOSSES = ("grpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")

SETTINGS = {
    "model": Setting("llama", "tiny model", ("llama", "qwen2", "gemma2", "cohere", "qwen3_moe")),
    "loss": Setting("grpo", "loss type of GRPO; bnpo is left out: a mean over the micro-batch by definition", LOSSES),
    "beta": Setting(0.0, "weight of the KL in GRPO, RLOO and GMPO", (0.0, 0.04)),
    "split": Setting("8x1", "batch x accumulation", SPLITS),
    "padding": Setting(
        "left",
        "side of the tokenizer, to a multiple of 16, none, or several sequences packed into a row (SFT)",
        ("left", "right", "extra", "none", "packed"),
    ),
    "pad": Setting("<pad>", "the tokenizer's padding token; TRL takes <eos> where there is none", ("<pad>", "<eos>")),
    "checkpointing": Setting(drive.OFF, "gradient checkpointing", (drive.OFF, drive.REENTRANT, drive.NON_REENTRANT)),
    "tools": Setting(False, "some completion tokens are a tool's: GRPO, GMPO, distillation", (False, True)),
    "teacher": Setting("qwen2", "distillation's; cohere scales its logits", ("qwen2", "cohere")),
    "precision": Setting("fp32", "float32, or autocast to bfloat16", ("fp32", "autocast")),
}


def plain_twin(**given: Any) -> SimpleNamespace:
    """The settings of a twin that differs in nothing but what is given."""
    return SimpleNamespace(**defaults(SETTINGS) | given)


OWN = frozenset(name for spec in SPECS.values() for name in spec.own)
"""The settings that not every trainer has."""


def split(trainer: str, accumulated: str) -> str:
    """How a twin of the trainer is cut to look at something else."""
    return accumulated if SPECS[trainer].accumulates else "8x1"


def _short(*trainers: str) -> list[CheckCase]:
    """Each trainer in micro-batches of one, its first accumulated setting."""
    return [(t, {**SPECS[t].twins[0], "split": split(t, "1x8")}) for t in trainers]


PR = [*_short(*JUDGED), ("grpo-trainer", {"loss": "dapo", "split": "2x4"}), ("grpo-trainer", {"tools": True})]


def _in_pr(case: CheckCase) -> bool:
    """All of SFT's and GRPO's; of the others no model, which `config-values` has, nor what transformers does for all alike."""
    return case[0] in ("sft-trainer", "grpo-trainer") or not case[1].keys() & {"model", "checkpointing", "precision"}


@by_profile(quick=_short("sft-trainer", "grpo-trainer"), pr=PR, covered=_in_pr)
def cases(seed: int) -> Iterator[CheckCase]:
    """Every value of every setting by itself, per trainer, and GRPO's losses at 2x4."""
    for trainer in JUDGED:
        spec, half = SPECS[trainer], split(trainer, "2x4")
        for settings in spec.twins:
            yield from ((trainer, {**settings, "split": cut}) for cut in SPLITS)
        for name in [n for n in SETTINGS if n != "split" and (n in spec.own or n not in OWN)]:
            values = [v for v in SETTINGS[name].choices or () if v != "packed" or v in spec.own]
            yield from ((trainer, {name: v, "split": half}) for v in values)


@check("twins", JUDGED, SETTINGS, cases, paths=("released", "fused", "fixed"))
def twins(call: CheckCall) -> Iterator[Quantity]:
    """One window cut, padded, checkpointed or cast in another way: the gradients of the definition all the same."""
    s, trainer = call.settings, call.case.family
    path = call.path if call.spec.fused_fix else twin_runs.unfixed(call.path)
    steps = twin_runs.train(twin_runs.build(trainer, s, path), call.path, weigh=s.checkpointing != drive.OFF)
    yield twin_runs.all_there(trainer, steps)
    step = by_definition(trainer, s)
    yield window_loss(step, sum(steps.losses))
    yield finite(steps.gradients[0])
    yield gradients(step, steps.gradients[0], message=functools.partial(_first_divergence, call))
    if s.checkpointing != drive.OFF:
        yield _saved(call, steps.activations)


PLAIN = ("padding", "pad", "checkpointing", "precision")
"""What the run that a twin is compared with has at its default; it is cut into the same micro-batches."""


def _first_divergence(call: CheckCall) -> str:
    """Where the forward passes of the twin and of the plain run first differ, or that they do not: both are wrong."""
    plain = SimpleNamespace(**vars(call.settings) | {name: SETTINGS[name].default for name in PLAIN})
    if plain == call.settings and call.path == "released":
        return "this is the plain run"
    first, second = (
        first_divergence.outputs(twin_runs.build(call.case.family, s, path))
        for s, path in ((plain, "released"), (call.settings, call.path))
    )
    return first_divergence.description(first, second)


def _saved(call: CheckCall, checkpointed: int) -> Quantity:
    """Checkpointing that keeps as many activations as none does nothing, whatever the config says."""
    s = SimpleNamespace(**{**vars(call.settings), "checkpointing": drive.OFF})
    plain = twin_runs.train(twin_runs.build(call.case.family, s, call.path), call.path, weigh=True).activations
    message = f"{checkpointed} bytes of activations are kept, {plain} without checkpointing: it does nothing"
    return holds("saved activations", checkpointed < plain, message, "bytes", float(checkpointed), float(plain))


def by_definition(trainer: str, s: SimpleNamespace) -> Oracle:
    """The step of the definition, shared by all twins of one loss."""
    return _by_definition(trainer, s.model, s.loss, s.beta, s.tools, s.teacher, s.precision)


@functools.lru_cache(maxsize=4)
def _by_definition(
    trainer: str, model: str, loss: str, beta: float, tools: bool, teacher: str, precision: str
) -> Oracle:
    s = SimpleNamespace(model=model, loss=loss, beta=beta, tools=tools, teacher=teacher)
    rounding = AutocastRounding if precision == "autocast" else StepRounding
    return exact_step(stored_window.policy(model, torch.float64), twin_losses.definition(trainer, s), rounding)
