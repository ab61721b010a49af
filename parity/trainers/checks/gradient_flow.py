"""Gradient flow: after one step every trainable parameter has a finite gradient that is not zero, and has moved.

Reentrant checkpointing gives no gradient at all when nothing that enters the checkpointed layers requires one, as with
frozen embeddings: "None of the inputs have requires_grad=True", a warning that may not be printed. The loss then
wanders and the learning rate has no effect.
"""

from collections.abc import Iterator
from typing import Any

import torch

from parity.case.inputs import Setting
from parity.trainers.check import CheckCall, CheckCase, Quantity, check, holds
from parity.trainers.rig import drive, models, recorder
from parity.trainers.rig.drawn import normal
from parity.upstream import trl

TRAINERS = ("grpo-trainer", "rloo-trainer", "online-dpo-trainer", "dpo-trainer", "sft-trainer")
TRAINED = {
    "all": "every parameter",
    "frozen-embeddings": "all but the embeddings",
    "lora": "a LoRA that the trainer makes from peft_config",
}
SETTINGS = {
    "checkpointing": Setting(
        drive.REENTRANT, "gradient checkpointing", (drive.OFF, drive.REENTRANT, drive.NON_REENTRANT)
    ),
    "trained": Setting("lora", "; ".join(f"{k}: {v}" for k, v in TRAINED.items()), tuple(TRAINED)),
}
PR: tuple[CheckCase, ...] = (("grpo-trainer", {"trained": "frozen-embeddings"}), ("online-dpo-trainer", {}))
"""The two that failed."""


def cases(seed: int) -> Iterator[CheckCase]:
    for trainer in TRAINERS:
        for checkpointing in SETTINGS["checkpointing"].choices or ():
            yield from ((trainer, {"checkpointing": checkpointing, "trained": trained}) for trained in TRAINED)


@check("gradient-flow", TRAINERS, SETTINGS, cases, pr=PR, moves=True)
def gradient_flow(call: CheckCall) -> Iterator[Quantity]:
    """One step gives every trainable parameter a finite gradient that is not zero, and moves it."""
    s, model = call.settings, models.model("llama")
    if s.trained == "frozen-embeddings":
        model.get_input_embeddings().requires_grad_(False)
    peft = trl.lora(models.targets("llama")) if s.trained == "lora" else None
    wanted = {"beta": 0.04, **drive.checkpointing(s.checkpointing)}
    trainer = drive.build(call.trainer, model, wanted, call.device, peft)
    with torch.no_grad():  # with B at zero, A has no gradient by definition
        for name, parameter in trainer.model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(0.02 * normal(2, name, parameter.shape).to(parameter))
    named = {n: p for n, p in trainer.model.named_parameters() if p.requires_grad}
    before = {n: p.detach().clone() for n, p in named.items()}
    seen: dict[str, Any] = {}
    failure = ""
    with drive.fixed(call.path, trainer), drive.seeded():
        try:
            seen = next(iter(recorder.train(trainer).gradients), {})
        except RuntimeError as error:
            if "does not require grad" not in str(error):
                raise
            failure = f" ({str(error).partition(chr(10))[0]})"
    absent = [n for n in named if seen.get(n) is None or not bool(seen[n].any())]
    infinite = [n for n, g in seen.items() if g is not None and not bool(g.isfinite().all())]
    wrong = {
        "gradients": ("no gradient", absent),
        "finite gradients": ("not finite", infinite),
        "learning rate has an effect": ("did not move", [n for n, p in named.items() if torch.equal(p, before[n])]),
    }
    for quantity, (told, names) in wrong.items():
        message = f"{len(names)} of {len(named)} parameters {told}: {', '.join(names[:5])}{failure}"
        yield holds(quantity, not names, message, value=float(len(named) - len(names)), exact=float(len(named)))
    norm = drive.logged(trainer).get("grad_norm")
    yield holds("grad_norm", norm is not None and 0.0 < float(norm) < float("inf"), f"grad_norm {norm}", value=norm)
