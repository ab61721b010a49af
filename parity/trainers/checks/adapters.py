"""Training a LoRA: the policy is base and adapter; the reference is the base, or the adapter before training."""

import dataclasses
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

from parity.case.inputs import Setting
from parity.errors import Unsupported
from parity.trainers.check import EVERY_PATH, CheckCall, CheckCase, Quantity, check
from parity.trainers.checks.twins import judged, twin
from parity.trainers.definitions.formulas import Loss
from parity.trainers.rig import drive, models, stored_window
from parity.trainers.rig.twin_runs import Run
from parity.trainers.specs import SPECS, TWINS, having
from parity.upstream import trl

KINDS = {
    "new": "peft_config: the reference is the base model",
    "existing": "a PeftModel with an adapter that is trained on: the reference is that adapter before the first step",
    "saved-head": "peft_config with the LM head in modules_to_save: the reference has the base model's head",
}
SETTINGS = {
    "adapter": Setting("new", "; ".join(f"{k}: {v}" for k, v in KINDS.items()), tuple(KINDS)),
    "model": Setting("llama", "tiny model", ("llama", "qwen3")),
    "checkpointing": Setting(drive.OFF, "gradient checkpointing", (drive.OFF, drive.REENTRANT, drive.NON_REENTRANT)),
    "precomputed": Setting(False, "precompute_ref_log_probs, DPO and KTO", (False, True)),
    "kl": Setting(False, "KTO with its own loss, which estimates a KL to the reference", (False, True)),
}
REFERRED = tuple(t for t in TWINS if SPECS[t].rewarded or SPECS[t].given == "ref_model")
"""Trainers that have a reference."""
TRAINED = 2
"""Seed of the adapter at the step that is judged; `stored_window.HANDED_OVER` of one at construction."""


@dataclasses.dataclass(frozen=True)
class Adapter:
    """What `twin_runs.build` asks for: the model, its peft_config, and the adapter moved after construction."""

    kind: str

    def model(self, architecture: str) -> Any:
        """What is handed to the trainer."""
        base = models.model(architecture)
        return stored_window.adapted(base, stored_window.HANDED_OVER) if self.kind == "existing" else base

    def config(self) -> Any:
        """The trainer's peft_config."""
        return None if self.kind == "existing" else trl.lora(**_saved(self.kind))

    def move(self, model: Any) -> None:
        """The adapter, away from where it started: a reference that were the policy would show."""
        stored_window.fill_adapter(model, TRAINED)

    def policy(self, architecture: str) -> Any:
        base = models.model(architecture, torch.float64)
        return stored_window.adapted(base, TRAINED, **_saved(self.kind)).train()

    def reference(self, architecture: str) -> str:
        """What `stored_window.reference` knows the reference by."""
        return architecture + (stored_window.ADAPTED if self.kind == "existing" else "")


def _saved(kind: str) -> dict[str, Any]:
    return {"modules_to_save": ["lm_head"]} if kind == "saved-head" else {}


FUSED = ("grpo-trainer", "dpo-trainer", "kto-trainer")
"""Trainers whose Liger path is handed the heads of policy and reference."""
PR: list[CheckCase] = [
    *((t, {}) for t in REFERRED),
    *((t, {"adapter": "existing"} | ({"precomputed": True} if t == "dpo-trainer" else {})) for t in REFERRED),
    *((t, {"adapter": "saved-head"}) for t in FUSED),
    ("kto-trainer", {"kl": True}),
]
"""Every trainer that has a reference, with a new adapter and one trained further; where heads are handed over, with one that
is trained."""


def cases(seed: int) -> Iterator[CheckCase]:
    """Every trainer with every kind, and with checkpointing."""
    for trainer in TWINS:
        for kind in KINDS if trainer in REFERRED else ("new", "saved-head"):
            yield trainer, {"adapter": kind}
            if trainer in having("precompute_ref_log_probs"):
                yield trainer, {"adapter": kind, "precomputed": True}
            if SPECS[trainer].data == "labels":
                yield trainer, {"adapter": kind, "kl": True}
        yield trainer, {"model": "qwen3"}
        for checkpointing in (drive.REENTRANT, drive.NON_REENTRANT):
            yield trainer, {"checkpointing": checkpointing}


@check("adapters", TWINS, SETTINGS, cases, pr=PR, paths=EVERY_PATH)
def adapters(call: CheckCall) -> Iterator[Quantity]:
    """One batch with a LoRA: loss and every gradient of the adapter, by the reference that its kind implies."""
    trainer, s = call.case.family, call.settings
    if s.adapter == "existing" and trainer not in REFERRED:
        raise Unsupported(f"{trainer} has no reference: an existing adapter is a new one to it")
    if s.kl and call.spec.data != "labels":
        raise Unsupported(f"{trainer} estimates no KL")
    more: dict[str, Any] = {"precompute_ref_log_probs": True} if s.precomputed else {}
    more |= {"loss_type": "kto"} if s.kl else {}
    drive.needs(call.trainer, *more)
    adapter = Adapter(s.adapter)
    settings = twin(trainer, model=s.model, beta=0.04, checkpointing=s.checkpointing)
    run = Run(trainer, settings, call.path, adapter=adapter, **more)
    told = SimpleNamespace(**vars(settings) | ({"loss": "kto"} if s.kl else {}))
    yield from judged(call, run, Loss(run.window, told, adapter.reference(s.model)), adapter.policy(s.model))
