"""The loss that a twin of any trainer must give, chosen by the trainer and the settings of the twin."""

import functools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from parity.trainers.definitions import preference, windows
from parity.trainers.rig import drive, models, twin_runs
from parity.trainers.rig.stored_window import Reference, Sample

Definition = Callable[[Any], Tensor]


def definition(
    trainer: str,
    s: SimpleNamespace,
    part: Sequence[Sample] | None = None,
    generation: windows.Generation | None = None,
    reference: Reference | None = None,
    earned: Tensor | None = None,
    clip: tuple[float, float] | None = None,
) -> Definition:
    """The loss of the window, or of a part of its rows, by its definition: a function of the float64 model.

    `reference`: where it is not the saved model of `s`; `earned`: rewards, where they are not those of the part;
    `clip`: ε and ε_high away from their defaults.
    """
    chosen = twin_runs.rows(trainer) if part is None else part
    asked = SimpleNamespace(
        s=s,
        rows=chosen,
        window=twin_runs.sequences(trainer, chosen),
        base=s.model if reference is None else reference,
        beta=twin_runs.beta(trainer, s),
        tools=twin_runs.external if s.tools else None,
        generation=generation,
        earned=earned,
        clip=clip,
        bounds={"clip": clip} if clip else {},
    )
    return LOSSES[trainer](asked)


def _dpo(trainer: str, a: SimpleNamespace) -> Definition:
    return functools.partial(windows.dpo, twin_runs.pair(trainer, a.rows), a.base, a.beta)


def _grpo(a: SimpleNamespace) -> Definition:
    settings = {"loss_type": a.s.loss, "beta": a.beta, "max_completion_length": drive.COMPLETION}
    settings |= dict(zip(("epsilon", "epsilon_high"), a.clip, strict=True)) if a.clip else {}
    return functools.partial(windows.grpo, a.window, a.base, settings, a.tools, a.generation, earned=a.earned)


def _distillation(a: SimpleNamespace) -> Definition:
    teacher = models.model(a.s.teacher, torch.float64).eval().requires_grad_(False)
    return functools.partial(windows.distillation, a.window, teacher, a.beta, a.tools)


LOSSES: dict[str, Callable[[SimpleNamespace], Definition]] = {
    "sft-trainer": lambda a: functools.partial(windows.sft, a.window),
    "dpo-trainer": functools.partial(_dpo, "dpo-trainer"),
    "online-dpo-trainer": functools.partial(_dpo, "online-dpo-trainer"),
    "kto-trainer": lambda a: functools.partial(
        preference.apo_zero_unpaired, a.window, twin_runs.labels(a.rows), a.base, a.beta
    ),
    "rloo-trainer": lambda a: functools.partial(
        windows.rloo, a.window, a.base, a.beta, a.generation, earned=a.earned, **a.bounds
    ),
    "gmpo-trainer": lambda a: functools.partial(
        windows.gmpo, a.window, a.base, a.beta, a.tools, a.generation, **a.bounds
    ),
    "grpo-trainer": _grpo,
    "distillation-trainer": _distillation,
}
"""Trainer -> the loss of its twins, of what `definition` was asked."""
