"""Twins: runs of a real trainer that must give the same gradients, each judged against the definition in float64.

A twin differs from the plain run in one thing that has no place in the loss: how the window is cut into micro-batches,
where the padding stands, whether activations are checkpointed. What is judged is one optimizer window of stored data,
eight sequences of unequal lengths that go in through a dataset and come out of the trainer's own batching.
"""

import functools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from parity.case.inputs import Setting, defaults
from parity.judge.operations import AnyOperation
from parity.judge.oracle import Oracle
from parity.trainers.check import EVERY_PATH, CheckCall, CheckCase, Quantity, check, holds, shared
from parity.trainers.definitions.formulas import Loss
from parity.trainers.definitions.training_step import AutocastRounding, exact_step, first_step
from parity.trainers.rig import drawn, drive, stored_window
from parity.trainers.rig.stored_window import Window
from parity.trainers.rig.twin_runs import HEAD, PADDINGS, PROMPTS_TOO, Run
from parity.trainers.specs import JUDGED, SPECS

SPLITS = ("8x1", "4x2", "2x4", "1x8")
RATE = 0.01
GRPO_TYPES = ("grpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")

SETTINGS = {
    "model": Setting("llama", "tiny model", ("llama", "qwen2", "gemma2", "cohere", "qwen3_moe", "gemma4")),
    "loss": Setting("grpo", "of GRPO; bnpo is left out: a mean over the micro-batch by definition", GRPO_TYPES),
    "beta": Setting(0.0, "weight of the KL in GRPO, RLOO and GMPO", (0.0, 0.04)),
    "split": Setting("8x1", "batch x accumulation", SPLITS),
    "padding": Setting(
        "left",
        "side of the tokenizer, to a multiple of 16; SFT: none, or several sequences packed into a row",
        ("left", "right", "extra", "none", "packed"),
    ),
    "pad": Setting("<pad>", "the tokenizer's padding token; TRL takes <eos> where there is none", ("<pad>", "<eos>")),
    "checkpointing": Setting(drive.OFF, "gradient checkpointing", (drive.OFF, drive.REENTRANT, drive.NON_REENTRANT)),
    "frozen": Setting(
        False, "all is trained but the embeddings: what enters the layers has no gradient", (False, True)
    ),
    "tools": Setting(False, "some completion tokens are a tool's: GRPO, GMPO, distillation", (False, True)),
    "teacher": Setting(
        "qwen2", "distillation's; cohere scales its logits, gemma2 caps them", ("qwen2", "cohere", "gemma2")
    ),
    "temperature": Setting(1.0, "distillation's", (1.0, 0.7)),
    # at 0.5 student and teacher stand alike in the mixture
    "mixture": Setting(0.3, "distillation's beta: 0 forward KL; 1 reverse KL, TRL's default", (0.3, 0.0, 1.0)),
    HEAD: Setting(False, "GRPO: the LM head's weight in float32, which it has here", (False, True)),
    "precision": Setting("fp32", "float32, or autocast to bfloat16", ("fp32", "autocast")),
}
OWN = frozenset(name for spec in SPECS.values() for name in spec.own)
"""The settings that not every trainer has."""
TOLD = ("model", "loss", "beta", "tools", "teacher", "temperature", "precision", "whole", "frozen")
"""Settings of a twin that change its loss, or how it is rounded."""


def twin(trainer: str, **given: Any) -> SimpleNamespace:
    """The settings of a twin that differs in nothing but what is given; loss and beta are the trainer's own where it has such.
    `kl`: KTO's loss that estimates one; `whole`: SFT's that trains on prompts too."""
    s, spec = SimpleNamespace(**defaults(SETTINGS) | {"kl": False, "whole": False} | given), SPECS[trainer]
    s.loss = s.loss if "loss" in spec.own else "kto" if s.kl else spec.loss
    s.beta = s.mixture if "mixture" in spec.own else s.beta if spec.beta is None else spec.beta
    s.whole = s.whole or PROMPTS_TOO.items() <= PADDINGS.get(s.padding, {}).items()
    return s


def split(trainer: str, accumulated: str) -> str:
    """How a twin of the trainer is cut to look at something else."""
    return accumulated if SPECS[trainer].accumulates else "8x1"


def _short(*trainers: str) -> list[CheckCase]:
    """Each trainer in micro-batches of one, its first accumulated setting."""
    return [(t, {**SPECS[t].twins[0], "split": split(t, "1x8")}) for t in trainers]


PR = [
    *_short(*JUDGED),
    ("grpo-trainer", {"loss": "dapo", "split": "2x4"}),
    ("grpo-trainer", {"tools": True}),
    *((t, {"frozen": True, "checkpointing": drive.REENTRANT, "split": "2x4"}) for t in ("sft-trainer", "grpo-trainer")),
]


def _in_pr(case: CheckCase) -> bool:
    """All of SFT's and GRPO's; of the others no model, which `config-values` has, nor what transformers does for all alike."""
    return case[0] in ("sft-trainer", "grpo-trainer") or not case[1].keys() & {"model", "checkpointing", "precision"}


def cases(seed: int) -> Iterator[CheckCase]:
    """Every value of every setting by itself, per trainer, and GRPO's losses at 2x4."""
    for trainer in JUDGED:
        spec, half = SPECS[trainer], split(trainer, "2x4")
        for settings in spec.twins:
            yield from ((trainer, {**settings, "split": cut}) for cut in SPLITS)
        for kind in SETTINGS["checkpointing"].choices or ():
            yield trainer, {"frozen": True, "checkpointing": kind, "split": half}
        yield trainer, {"model": "gemma4", "checkpointing": drive.REENTRANT}  # its layers share keys and values
        for name in [n for n in SETTINGS if n not in ("split", "frozen") and (n in spec.own or n not in OWN)]:
            values = [v for v in SETTINGS[name].choices or () if v not in OWN or v in spec.own]
            yield from ((trainer, {name: v, "split": half}) for v in values)


QUICK = _short("sft-trainer", "grpo-trainer")


@check("twins", JUDGED, SETTINGS, cases, quick=QUICK, pr=PR, covered=_in_pr, paths=EVERY_PATH)
def twins(call: CheckCall) -> Iterator[Quantity]:
    """One window cut, padded, checkpointed or cast in another way: the gradients of the definition all the same."""
    s = twin(call.case.family, **vars(call.settings))
    more: dict[str, Any] = {"changed": freeze, "learning_rate": RATE} if s.frozen else {}
    run = Run(call.case.family, s, call.path, **more)
    yield run.all_there()
    yield from first_step(by_definition(run.trainer, s), run.steps)
    if s.frozen:
        yield moved(run)


def freeze(policy: Any) -> Any:
    """`policy`, its embeddings frozen."""
    policy.get_input_embeddings().requires_grad_(False)
    return policy


def moved(run: Run) -> Quantity:
    """Every parameter that is trained moves in a step whose learning rate is above 0."""
    before, now = run.steps.parameters[0], dict(run.built.model.named_parameters())
    still = [name for name in run.steps.gradients[0] if torch.equal(now[name], before[name])]
    return holds("learning rate has an effect", not still, f"{len(still)} parameters did not move, first {still[:1]}")


def by_definition(trainer: str, s: SimpleNamespace) -> Oracle:
    return _by_definition(trainer, tuple(getattr(s, name) for name in TOLD), drawn.seed())


@functools.lru_cache(maxsize=4)
def _by_definition(trainer: str, told: tuple[Any, ...], _seed: int) -> Oracle:
    s = SimpleNamespace(**dict(zip(TOLD, told, strict=True)))
    rounding = AutocastRounding if s.precision == "autocast" else AnyOperation
    policy = stored_window.policy(s.model, torch.float64)
    return exact_step(freeze(policy) if s.frozen else policy, Loss(Window.of(trainer, whole=s.whole), s), rounding)


def judged(
    call: CheckCall, run: Run, loss: Callable[[Any], Tensor], model: Any = None, there: bool = True
) -> Iterator[Quantity]:
    """Every sequence is `there`; loss and gradients of the run's step are those of `loss` of its policy, or of `model`."""
    if there:
        yield run.all_there()
    yield from first_step(step_of(call, run, loss, model), run.steps)


def step_of(call: CheckCall, run: Run, loss: Callable[[Any], Tensor], model: Any = None) -> Oracle:
    """The step by `loss` of the run's policy, or of `model`, made once for every path of a case."""

    def step() -> Oracle:
        return exact_step(stored_window.policy(run.s.model, torch.float64) if model is None else model, loss)

    return shared(call, "step", step)
