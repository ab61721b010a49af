"""The loss that a twin of any trainer must give, chosen by the trainer and the settings of the twin."""

import functools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from parity.trainers.definitions import preference, windows
from parity.trainers.rig import drive, models, stored_window, twin_runs
from parity.trainers.rig.stored_window import Reference, Row

Definition = Callable[[Any], Tensor]


def definition(
    trainer: str,
    s: SimpleNamespace,
    part: Sequence[Row] | None = None,
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
    window = twin_runs.sequences(trainer, chosen)
    beta = twin_runs.BETA.get(trainer, s.beta)
    base = s.model if reference is None else reference
    bounds = {"clip": clip} if clip else {}
    tools = twin_runs.external if s.tools else None
    if trainer == "sft-trainer":
        return functools.partial(windows.sft, window)
    if trainer == "dpo-trainer":
        return functools.partial(windows.dpo, twin_runs.pair(trainer, chosen), base, beta)
    if trainer == "online-dpo-trainer":
        pair = stored_window.preferred(chosen)
        return functools.partial(windows.dpo, pair, base, beta)
    if trainer == "kto-trainer":
        return functools.partial(preference.apo_zero_unpaired, window, [r.label for r in chosen], base, beta)
    if trainer == "rloo-trainer":
        return functools.partial(windows.rloo, window, base, beta, generation, earned=earned, **bounds)
    if trainer == "gmpo-trainer":
        return functools.partial(windows.gmpo, window, base, beta, tools, generation, **bounds)
    if trainer == "grpo-trainer":
        settings = {"loss_type": s.loss, "beta": beta, "max_completion_length": drive.COMPLETION}
        settings |= dict(zip(("epsilon", "epsilon_high"), clip, strict=True)) if clip else {}
        return functools.partial(windows.grpo, window, base, settings, tools, generation, earned=earned)
    teacher = models.model(s.teacher, torch.float64).eval().requires_grad_(False)
    return functools.partial(windows.distillation, window, teacher, beta, tools)
