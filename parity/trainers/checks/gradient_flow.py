"""Gradient flow: after one step every trainable parameter has a finite gradient that is not zero, and has moved.

Reentrant checkpointing gives no gradient at all when nothing that enters the checkpointed layers requires one, as with
frozen embeddings: "None of the inputs have requires_grad=True", a warning that may not be printed. The loss then
wanders and the learning rate has no effect.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from parity.case.case import normal
from parity.case.inputs import Setting
from parity.errors import Unsupported
from parity.trainers.check import CheckCall, CheckCase, Quantity, by_profile, check, holds, pairwise
from parity.trainers.rig import drive, models, recorder
from parity.upstream import trl

TRAINERS = (
    *("grpo-trainer", "rloo-trainer", "online-dpo-trainer", "dpo-trainer", "sft-trainer"),
    *("cpo-trainer", "orpo-trainer", "gmpo-trainer"),
)
TRAINED = {
    "all": "every parameter",
    "frozen-embeddings": "all but the embeddings",
    "lora": "a LoRA that the trainer makes from peft_config",
    "lora-given": "a PEFT model handed to the trainer",
}
SETTINGS = {
    "model": Setting("llama", "tiny model", ("llama", "qwen3", "gemma2", "gemma4", "qwen3_moe")),
    "checkpointing": Setting(
        drive.REENTRANT, "gradient checkpointing", (drive.OFF, drive.REENTRANT, drive.NON_REENTRANT)
    ),
    "trained": Setting("lora", "; ".join(f"{k}: {v}" for k, v in TRAINED.items()), tuple(TRAINED)),
}


PR: tuple[CheckCase, ...] = (
    ("grpo-trainer", {"trained": "frozen-embeddings"}),
    ("online-dpo-trainer", {}),
    *((trainer, {}) for trainer in ("cpo-trainer", "orpo-trainer", "gmpo-trainer")),
)
"""The two that failed, and the trainers that have no other check."""


@by_profile(pr=PR)
def cases(seed: int) -> Iterator[CheckCase]:
    """Every pair of values, per trainer."""
    yield from PR
    for number, trainer in enumerate(TRAINERS):
        for case in pairwise(SETTINGS, seed + number):
            yield trainer, case


@check("gradient-flow", TRAINERS, SETTINGS, cases, moves=True)
def gradient_flow(call: CheckCall) -> Iterator[Quantity]:
    """One step gives every trainable parameter a finite gradient that is not zero, and moves it."""
    trainer = build(call)
    named = {n: p for n, p in trainer.model.named_parameters() if p.requires_grad}
    before = {n: p.detach().clone() for n, p in named.items()}
    failure = ""
    with drive.fixed(call.path, trainer):
        try:
            with drive.seeded():
                seen = next(iter(recorder.train(trainer).gradients), {})
            log = drive.logged(trainer)
        except RuntimeError as error:
            if "does not require grad" not in str(error):
                raise
            seen, log, failure = {}, {}, str(error).partition("\n")[0]
    reached = _reached(named)
    dead = [n for n in reached if seen.get(n) is None or not bool(seen[n].any())]  # type: ignore[union-attr]
    infinite = [n for n, g in seen.items() if g is not None and not bool(g.isfinite().all())]
    still = [n for n in reached if torch.equal(named[n].detach(), before[n])]
    yield _all("gradients", "no gradient", dead, reached, failure)
    yield holds("finite gradients", not infinite, _told("not finite", infinite, named, ""))
    yield _all("learning rate has an effect", "did not move", still, reached, failure)
    norm = log.get("grad_norm")
    yield holds("grad_norm", norm is not None and 0.0 < float(norm) < float("inf"), f"grad_norm {norm}", value=norm)


def build(call: CheckCall) -> Any:
    """The trainer of a case, its model frozen or adapted as the case says."""
    s = call.settings
    wanted = {"beta": 0.04, **drive.checkpointing(s.checkpointing)}
    model = models.model(s.model)
    peft = None
    if s.trained == "frozen-embeddings":
        if model.get_output_embeddings().weight is model.get_input_embeddings().weight:
            raise Unsupported(f"{s.model}: its embeddings are its head")
        model.get_input_embeddings().requires_grad_(False)
    elif s.trained == "lora":
        peft = trl.lora(models.targets(s.model))
    elif s.trained == "lora-given":
        import peft as library

        model = library.get_peft_model(model, trl.lora(models.targets(s.model)))
    trainer = drive.build(call.trainer, model, wanted, (), call.device, peft)
    with torch.no_grad():  # with B at zero, A has no gradient by definition
        for name, parameter in trainer.model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(0.02 * normal(2, name, parameter.shape).to(parameter))
    return trainer


def _reached(named: Mapping[str, Any]) -> list[str]:
    """The trainable parameters that text reaches: not the vision tower, nor an expert that no token was routed to."""
    away = ("vision", "multi_modal_projector", "embed_vision", "experts", "router")
    return [n for n in named if not any(part in n for part in away)]


def _all(quantity: str, what: str, wrong: list[str], reached: list[str], failure: str) -> Quantity:
    """That no parameter is wrong; the value is how many are right."""
    right = float(len(reached) - len(wrong))
    return holds(quantity, not wrong, _told(what, wrong, reached, failure), value=right, exact=float(len(reached)))


def _told(what: str, names: list[str], of: Any, failure: str) -> str:
    if not names:
        return ""
    shown = ", ".join(names[:5]) + (", …" if len(names) > 5 else "")
    return f"{len(names)} of {len(of)} parameters {what}: {shown}" + (f" ({failure})" if failure else "")
