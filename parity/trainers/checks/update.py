"""What becomes of the gradients: clipped, at the scheduler's learning rate, with weight decay, and after a resumed run. And of
the model that a trainer has had, which a reference, an average of weights or the next trainer is a copy of."""

import copy
import dataclasses
import functools
import itertools
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from parity.case.inputs import Setting
from parity.judge.oracle import Oracle
from parity.judge.problem import Problem
from parity.trainers.check import CheckCall, CheckCase, Quantity, check, entry, holds, same, tells
from parity.trainers.checks.twin_windows import STORED
from parity.trainers.checks.twins import twin
from parity.trainers.definitions.formulas import Loss
from parity.trainers.definitions.training_step import exact_step, gradients, slopes
from parity.trainers.rig import models, recorder, stored_window
from parity.trainers.rig.twin_runs import Run
from parity.trainers.specs import JUDGED

STEPS, RATE = 2, 0.02
BETAS, EPSILON = (0.8, 0.9), 1e-3
"""AdamW's, away from their defaults; ε is of the size of the gradients, so that one that is left out shows."""
SCHEDULES = {
    "constant": "the learning rate of the config",
    "linear": "falls to 0 in two steps",
    "warm-up": "linear, one step of warm-up: 0, then the learning rate",
}
SETTINGS = {
    "optimizer": Setting("sgd", "optim", ("sgd", "adamw_torch")),
    "clip": Setting(0.0, "max_grad_norm; 0 clips nothing", (0.0, 0.2)),
    "decay": Setting(0.0, "weight_decay: of matrices, not of biases and norms", (0.0, 0.5)),
    "schedule": Setting("constant", "; ".join(f"{k}: {v}" for k, v in SCHEDULES.items()), tuple(SCHEDULES)),
    "resumed": Setting(False, "the second step by another trainer, from the first one's checkpoint", (False, True)),
    "model": Setting("phi", "it has biases and layer norms, Qwen3 norms of queries and keys", ("phi", "qwen3")),
}
PR: list[CheckCase] = [
    ("sft-trainer", {"clip": 0.2, "decay": 0.5, "schedule": "linear", "model": "qwen3"}),
    ("sft-trainer", {"optimizer": "adamw_torch", "clip": 0.2, "decay": 0.5, "schedule": "warm-up", "resumed": True}),
]
RESTORED = {"restored": Setting(False, "the model gets its own forward back before the copy", (False, True))}
COPIED: list[CheckCase] = [(trainer, settings) for trainer in JUDGED for settings in ({}, {"restored": True})]
OF_USER = [(trainer, settings) for trainer in JUDGED for _, settings in PR]
"""A subclass may override what trainers share."""


def cases(seed: int) -> Iterator[CheckCase]:
    """Each value of each setting by itself with either optimizer, per trainer."""
    for trainer, optimizer in itertools.product(STORED, SETTINGS["optimizer"].choices or ()):
        for name in ("clip", "decay", "schedule", "resumed"):
            yield from ((trainer, {"optimizer": optimizer, name: v}) for v in SETTINGS[name].choices or ())
    yield from ((trainer, settings) for trainer in STORED for _, settings in PR)


@check("update", JUDGED, SETTINGS, cases, pr=PR, of_user=OF_USER, paths=("released",))
def update(call: CheckCall) -> Iterator[Quantity]:
    """Two steps: gradients are clipped by their norm, parameters move as the optimizer's formula says."""
    s = call.settings
    with tempfile.TemporaryDirectory(prefix="parity-update-") as folder:
        run = Run(
            call.case.family,
            twin(call.case.family, model=s.model, split="2x2" if call.spec.accumulates else "4x1"),
            **_config(s, folder),
        )
        first = run.steps
        runs = [(run, first, 0), (run, first, 1)]
        if s.resumed:
            other = Run(run.trainer, run.s, **_config(s, folder))
            again = recorder.train(other.built, resume_from_checkpoint=str(Path(folder, "checkpoint-1")))
            runs[1] = (other, again, len(again.gradients) - 1)
    batches = [batch for _, steps, i in runs for batch in steps.window(i)]
    yield same(recorder.sequences_of(batches), run.window.expected)
    taken: list[Mapping[str, Tensor]] = []
    for number, (own, steps, i) in enumerate(runs):
        before, step = steps.parameters[i], f"of step {number + 1}"
        policy = stored_window.policy(s.model, torch.float64)
        policy.load_state_dict(before)
        loss = Loss(run.window.found_in(steps.window(i)), run.s)
        exact = exact_step(policy, loss)
        norm = math.sqrt(sum(float(g.square().sum()) for g in slopes(exact).values()))  # of all together
        share = 1.0
        if s.clip:
            share = min(1.0, s.clip / (norm + 1e-6))  # torch's own 1e-6
            yield tells("clipped", share < 0.9, f"gradients of norm {norm:.3g} are clipped at {s.clip}", norm)
            exact = exact_step(policy, functools.partial(_times, share, loss))
        yield gradients(exact, steps.gradients[i], f"gradient {step}")
        taken.append({n: torch.zeros_like(before[n]) if g is None else g for n, g in steps.gradients[i].items()})
        logged = [row["grad_norm"] for row in own.built.state.log_history if "grad_norm" in row]
        if logged:  # some releases log none where nothing is clipped
            unclipped = _unclipped(taken[-1], share)
            yield entry(f"grad_norm {step}", logged[number], unclipped, "the norm before clipping", of="norm")
        after = steps.parameters[i + 1] if i + 1 < len(steps.parameters) else dict(own.built.model.named_parameters())
        found = {n: after[n].detach() for n in before}
        message = "by the formula of the optimizer, of the gradients that it was given"
        yield gradients(moved(s, before, taken), found, f"parameters behind step {number + 1}", message, prefix="")


def _times(share: float, loss: Loss, model: Any) -> Tensor:
    return share * loss(model)


def _unclipped(gradients: Mapping[str, Tensor], share: float) -> Oracle:
    """The norm of all gradients together before each was multiplied by `share`."""
    inputs = {"gradient": torch.cat([g.flatten() for g in gradients.values()])}
    return Problem(lambda gradient: {"norm": gradient.norm() / share}, inputs, {}, ()).oracle


def _config(s: SimpleNamespace, folder: str) -> dict[str, Any]:
    kept = {"save_strategy": "steps", "save_steps": 1, "output_dir": folder} if s.resumed else {}
    own = {"adam_beta1": BETAS[0], "adam_beta2": BETAS[1], "adam_epsilon": EPSILON, "weight_decay": s.decay}
    schedule = {"lr_scheduler_type": "constant" if s.schedule == "constant" else "linear"}
    steps = {"max_steps": STEPS, "learning_rate": RATE, "warmup_steps": int(s.schedule == "warm-up"), **schedule}
    return {"optim": s.optimizer, "max_grad_norm": s.clip, **recorder.LOGGED, **own, **steps, **kept}


def moved(s: SimpleNamespace, before: Mapping[str, Tensor], taken: Sequence[Mapping[str, Tensor]]) -> Oracle:
    """Parameters, from those before the last step and the gradients of every step, name by name: SGD, θ - η(g + λθ); or
    AdamW (arXiv 1711.05101, algorithm 2), θ - η·λθ - η·m̂/(√v̂ + ε). λ is 0 for what is no matrix."""
    step = len(taken)
    rate = RATE * {"constant": 1.0, "linear": 1 - (step - 1) / STEPS, "warm-up": float(step - 1)}[s.schedule]

    def define(before: Mapping[str, Tensor], taken: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        out = {}
        for name, p in before.items():
            decay, grads = s.decay if p.dim() > 1 else 0.0, [g[name] for g in taken]
            if s.optimizer == "sgd":
                out[name] = p - rate * (grads[-1] + decay * p)
                continue
            a, b = BETAS
            m = sum((1 - a) * a ** (step - 1 - i) * g for i, g in enumerate(grads)) / (1 - a**step)
            v = sum((1 - b) * b ** (step - 1 - i) * g * g for i, g in enumerate(grads)) / (1 - b**step)
            out[name] = p * (1 - rate * decay) - rate * m / (v.sqrt() + EPSILON)
        return out

    inputs = {"before": dict(before), "taken": [dict(g) for g in taken]}
    oracle = Problem(define, inputs, {}, ()).oracle
    return dataclasses.replace(oracle, kind=lambda name, found: {"scalar": False, "entrywise": True})


@check("copies", JUDGED, RESTORED, lambda seed: COPIED, pr=COPIED[:2], paths=("released",))
def copies(call: CheckCall) -> Iterator[Quantity]:
    """The copy computes as the original did, and goes on to when the weights of the original change."""
    built = Run(call.case.family, twin(call.case.family)).built
    original = built.model.eval()
    if call.settings.restored:
        vars(original).pop("forward", None)
    copied = copy.deepcopy(original)
    ids = torch.tensor([models.ids(9, "copied", 12)], device=original.device)

    @torch.no_grad()
    def logits(model: torch.nn.Module) -> Tensor:
        found: Tensor = model(input_ids=ids).logits
        return found

    before, of_copy = logits(original), logits(copied)
    yield holds("logits of the copy", torch.equal(before, of_copy), "they are not those of the original")
    with torch.no_grad():
        for p in original.parameters():
            p.mul_(1.25)
    off = float((logits(copied) - of_copy).abs().max())
    moved = float((logits(original) - before).abs().max())
    yield holds("logits of the original", moved > 0, "its weights were changed, and its logits are the same")
    message = (
        f"the weights of the original were changed: the copy's logits are {off:.3g} off, the original's {moved:.3g}"
    )
    yield holds("logits of the copy behind a step of the original", off == 0, message, off, 0.0)
