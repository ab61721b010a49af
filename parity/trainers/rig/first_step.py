"""The first step of a real trainer, watched: what it scored and what it logged."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from parity.errors import Unsupported
from parity.trainers.check import CheckCall
from parity.trainers.rig import batches, checkpointing, drive, models, recorder
from parity.upstream import trl


@dataclasses.dataclass
class FirstStep:
    """What one step of a real trainer showed.

    Attributes:
        ids, mask: what the model was given, (B, P + T).
        completion: 1 where a position belongs to a completion, (B, P + T).
        policy, reference: log-probs of the tokens of the last T positions, where the trainer has them apart, (B, T).
        loss: of the one micro-batch.
        log: the trainer's own log entry.
        advantages: (B,), where the trainer has them.
        lost: layers whose own checkpointing function was replaced.
    """

    ids: Tensor
    mask: Tensor
    completion: Tensor
    policy: Tensor | None = None
    reference: Tensor | None = None
    loss: float = math.nan
    log: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    advantages: Tensor | None = None
    lost: list[str] = dataclasses.field(default_factory=list)


def run(call: CheckCall) -> FirstStep:
    """Build the trainer, watch what it scores, train one step.

    Raises:
        Unsupported: where the trainer cannot be asked for this case, or computed no reference log-probs.
    """
    s = call.settings
    wanted: dict[str, Any] = {"beta": s.beta, "temperature": s.temperature, **drive.checkpointing(s.checkpointing)}
    if "loss" in call.spec.own:
        wanted["loss_type"] = "grpo"
    if call.path == "fused":
        wanted |= trl.liger(drive.config(call.trainer))
    needed = ["beta", *(["temperature"] if s.temperature != 1.0 else [])]
    model = models.model(s.model)
    peft = trl.lora(models.targets(s.model)) if s.adapter == "lora" else None
    trainer = drive.build(call.trainer, model, wanted, needed, call.device, peft)
    wrapper = None
    if s.checkpointing == drive.CUSTOM:
        wrapper = checkpointing.install(trainer.model)
        if getattr(trainer, "ref_model", None) is not None:
            checkpointing.install(trainer.ref_model, checkpoint=False)
    with drive.fixed(call.path, trainer):
        watch = _watch_scores if call.spec.scored else _watch_online if call.spec.generates else _watch_pairs
        step = watch(trainer)
    if wrapper is not None:
        step.lost = checkpointing.wrapped(trainer.model, wrapper)
    return step


def _watch_scores(trainer: Any) -> FirstStep:
    """GRPO and RLOO: the log-probs as their one method hands them out; policy with gradients, reference without."""
    seen: dict[str, Any] = {}

    def scored(args: tuple[Any, ...], out: Any) -> None:
        logps = drive.scores(out)[0].detach()
        if torch.is_grad_enabled():
            seen.setdefault("policy", logps)
        elif args[0] is not trainer.model or trainer.ref_model is None:
            seen["reference"] = args[1], logps  # RLOO scores the old policy first, the reference last

    step, batch = _watched(trainer, drive.scorer(trainer), scored)
    given = batch.get("ref_per_token_logps")
    if given is None and "reference" not in seen:
        raise Unsupported("the trainer computed no reference log-probs, so there is no KL")
    reference = in_order(step.ids, *seen["reference"]) if given is None else given
    return dataclasses.replace(step, policy=seen.get("policy"), reference=reference, advantages=batch["advantages"])


def in_order(ids: Tensor, scored: Tensor, logps: Tensor) -> Tensor:
    """The rows of `logps` in the order of the micro-batch: a generation batch is shuffled before it is trained on."""
    return logps[[int((scored == row).all(1).nonzero()[0]) for row in ids]]


def _watch_online(trainer: Any) -> FirstStep:
    """Online DPO: `_forward` returns the log-probs, of the policy first, then of the reference."""
    found: list[Tensor] = []
    if not hasattr(trainer, "_forward"):
        raise Unsupported("no OnlineDPOTrainer._forward in the installed version")
    step, _ = _watched(trainer, "_forward", lambda args, out: found.append(out.detach()))
    return dataclasses.replace(step, policy=found[0], reference=found[1])


def _watch_pairs(trainer: Any) -> FirstStep:
    """DPO: the batch as the loss got it; log-ratios show in its metrics."""
    step, batch = _watched(trainer)
    if "completion_mask" not in batch or "input_ids" not in batch:
        raise Unsupported(f"the installed version hands its loss {', '.join(batch)}, not input_ids and completion_mask")
    return step


def _watched(
    trainer: Any, name: str = "", seen: Callable[[tuple[Any, ...], Any], None] | None = None
) -> tuple[FirstStep, dict[str, Any]]:
    """One step, and its batch; every call of the method `name` is told to `seen(args, result)`."""
    if seen is not None:
        drive.spied(trainer, name, seen)
    with drive.seeded():
        steps = recorder.train(trainer)
    batch = steps.batches[0]
    return FirstStep(*batches.parts(batch)[0], loss=steps.losses[0], log=drive.logged(trainer)), batch
