"""Faults of an engine or of its connection to a trainer, put in on purpose: what `judge` must fault."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from parity.case.case import normal
from parity.recording import Recording
from parity.rollouts import models
from parity.rollouts.judge import without_softcap
from parity.rollouts.scoring import Trainer

Made = tuple[Recording, Trainer, str]


@dataclasses.dataclass(frozen=True)
class Control:
    """A fault.

    Attributes:
        name: what is wrong.
        make: recording and trainer -> recording, trainer and definition with the fault; None where it changes nothing,
            a forgotten temperature of 1 for example.
    """

    name: str
    make: Callable[[Recording, Trainer], tuple[Recording, Trainer] | tuple[Recording, Trainer, str] | None]


def temperature_forgotten(r: Recording, t: Trainer) -> tuple[Recording, Trainer] | None:
    """The engine hands out its raw log-probs."""
    if r.raw_logps is None or (r.facts["temperature"] == 1.0 and not r.truncated):
        return None
    return dataclasses.replace(r, sampler_logps=r.raw_logps), t


def truncation_forgotten(r: Recording, t: Trainer) -> Made | None:
    """Truncated sampling is scored against the whole vocabulary, as TRL does it."""
    return (r, t, "full") if r.truncated else None


UPDATE = {torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 0.1}
"""Relative size of the update of every weight that the engine has missed. In bf16 one of 1 % is smaller than the rounding."""


def stale_weights(r: Recording, t: Trainer) -> tuple[Recording, Trainer]:
    """The trainer has taken a step that the engine does not know of."""

    def stepped(model: Any) -> Any:
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.add_(UPDATE[t.dtype] * float(p.float().square().mean().sqrt()) * normal(31, name, p.shape).to(p))
        return model

    return r, dataclasses.replace(t, change=stepped)


def softcap_lost(r: Recording, t: Trainer) -> tuple[Recording, Trainer] | None:
    """One of the two does not apply the softcap that the other does."""
    return None if models.softcap(t.folder) is None else (r, dataclasses.replace(t, change=without_softcap))


def nested_config_lost(r: Recording, t: Trainer) -> tuple[Recording, Trainer]:
    """One of the two reads rope_theta at the top of the config, where it no longer is, and takes a default for it."""

    def defaulted(model: Any) -> Any:
        rotary = model.get_decoder().rotary_emb
        n = len(rotary.inv_freq)
        rotary.inv_freq.copy_(ROPE_THETA ** (-torch.arange(n, dtype=torch.float64) / n))
        return model

    return r, dataclasses.replace(t, change=defaulted)


ROPE_THETA = 500_000.0
"""Another than that of the models, 10,000."""


def adapter_not_merged(r: Recording, t: Trainer) -> tuple[Recording, Trainer]:
    """The trainer trains a LoRA adapter, the engine samples from the base model."""

    def adapted(model: Any) -> Any:
        from peft import LoraConfig, get_peft_model

        out = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=r".*\.(q_proj|v_proj)$"))
        with torch.no_grad():
            for name, p in out.named_parameters():
                if "lora_" in name:
                    p.copy_((0.05 if "lora_B" in name else 1.0) * normal(32, name, p.shape).to(p))
        return out.eval()

    return r, dataclasses.replace(t, change=adapted)


def shifted(r: Recording, t: Trainer) -> tuple[Recording, Trainer]:
    """Each log-prob stands one token late, the first of each row being missing."""
    moved = r.sampler_logps.roll(1, 1)
    moved[:, 0] = torch.nan
    return dataclasses.replace(r, sampler_logps=moved), t


CONTROLS = {
    function.__name__: Control(function.__name__, function)
    for function in (
        temperature_forgotten,
        truncation_forgotten,
        stale_weights,
        softcap_lost,
        nested_config_lost,
        adapter_not_merged,
        shifted,
    )
}
