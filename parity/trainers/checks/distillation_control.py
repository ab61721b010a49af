"""GKD with a teacher in the same process, on the same ragged completions: the control of the teacher-server checks."""

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from parity.case.inputs import Setting
from parity.families.divergence import divergence
from parity.trainers.check import CheckCall, Quantity, check
from parity.trainers.checks.distillation import ARCHITECTURE, BETA, SPLIT, cases
from parity.trainers.definitions.gradients import first_step
from parity.trainers.definitions.training_step import exact_step
from parity.trainers.rig import batches, drive, models, recorder, stored_window, teacher_client
from parity.trainers.rig.stored_window import Sequences


@check(
    "ragged-control",
    ("gkd-trainer",),
    {
        "beta": BETA,
        "split": SPLIT,
        "prompts": Setting("equal", "lengths of the prompts", ("equal", "ragged")),
    },
    lambda profile, seed: [
        (trainer, {**settings, "prompts": prompts})
        for trainer, settings in cases("gkd-trainer", profile, seed)
        for prompts in teacher_client.SAMPLES
        if profile in ("nightly", "soak") or (prompts == "ragged" and settings["beta"] == 1.0)
    ],
    paths=("released",),
    moves=True,
)
def ragged_control(call: CheckCall) -> Iterator[Quantity]:
    """GKD with a local teacher on ragged completions: finite also in releases whose server path was not."""
    batch, accumulation = map(int, call.settings.split.split("x"))
    wanted = recorder.PLAIN | {
        "per_device_train_batch_size": batch,
        "gradient_accumulation_steps": accumulation,
        "lmbda": 0.0,
        "beta": call.settings.beta,
        "temperature": 1.0,
        "max_length": 32,
    }
    data = stored_window.dataset(teacher_client.samples(call.settings.prompts), "turns")
    given = {"teacher_model": models.model("qwen2"), "train_dataset": data}
    trainer = drive.build(call.trainer, models.model(ARCHITECTURE), wanted, device=call.device, **given)
    steps = recorder.train(trainer)
    window = [batches.sequences_of([b]) for b in steps.batches]
    local = all(n is None for n in steps.items)
    definition = functools.partial(_dense, window, call.settings.beta, local)
    step = exact_step(models.model(ARCHITECTURE, torch.float64).train(), definition)
    yield from first_step(step, steps)


def _dense(window: list[Sequences], beta: float, local: bool, model: Any) -> Tensor:
    """Mean over the completion tokens of the window; `local`: of each micro-batch, then over those (before 1.10)."""
    parts = []
    for batch in window:
        with torch.no_grad():  # in every replica anew: the trainer rounds its teacher as it rounds its student
            teacher = teacher_client.student_logps(_teacher(), batch, 1.0)
        pairs = zip(teacher_client.student_logps(model, batch, 1.0), teacher, strict=True)
        parts.append(torch.cat([_divergence(lp, lq, beta).sum(-1) for lp, lq in pairs]))
    return torch.stack([p.mean() for p in parts]).mean() if local else torch.cat(parts).mean()


@functools.cache
def _teacher() -> Any:
    return models.model("qwen2", torch.float64).eval().requires_grad_(False)


def _divergence(lp: Tensor, lq: Tensor, beta: float) -> Tensor:
    gone = torch.zeros_like(lp, dtype=torch.bool)
    return divergence(lp, lq, gone, gone, beta)
