"""Faults of an engine or of its connection to a trainer, put in on purpose: what `judge` must fault."""

import dataclasses
from typing import Any

import torch

from parity.judge.values import normal
from parity.recording import Recording
from parity.rollouts.judge import Trainer

Made = tuple[Recording, Trainer, str]
"""Recording, trainer and definition with the fault."""


def first(recording: Recording, rows: int) -> Recording:
    """A recording of its first rows alone."""
    return dataclasses.replace(recording, **{n: x[:rows] for n, x in recording.tensors().items()})


def temperature_forgotten(r: Recording, t: Trainer) -> Made:
    """The engine hands out its raw log-probs."""
    return dataclasses.replace(r, sampler_logps=r.raw_logps), t, "truncated"


def truncation_forgotten(r: Recording, t: Trainer) -> Made:
    """Truncated sampling is scored against the whole vocabulary, as TRL does it."""
    return r, t, "full"


UPDATE = {torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 0.1}
"""Relative size of the update of every weight that the engine has missed. In bf16 one of 1 % is smaller than the rounding."""


def stale_weights(r: Recording, t: Trainer) -> Made:
    """The trainer has taken a step that the engine does not know of."""

    def stepped(model: Any) -> Any:
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.add_(UPDATE[t.dtype] * float(p.float().square().mean().sqrt()) * normal(31, name, p.shape).to(p))
        return model

    return _changed(r, t, stepped)


def softcap_lost(r: Recording, t: Trainer) -> Made:
    """One of the two does not apply the softcap that the other does."""

    def uncapped(model: Any) -> Any:
        model.config.get_text_config().final_logit_softcapping = None
        return model

    return _changed(r, t, uncapped)


def nested_config_lost(r: Recording, t: Trainer) -> Made:
    """One of the two reads rope_theta at the top of the config, where it no longer is, and takes a default for it."""

    def defaulted(model: Any) -> Any:
        rotary = model.get_decoder().rotary_emb
        n = len(rotary.inv_freq)
        rotary.inv_freq.copy_(ROPE_THETA ** (-torch.arange(n, dtype=torch.float64) / n))
        return model

    return _changed(r, t, defaulted)


ROPE_THETA = 500_000.0
"""Another than that of the models, 10,000."""


def adapter_not_merged(r: Recording, t: Trainer) -> Made:
    """The trainer trains a LoRA adapter, the engine samples from the base model."""

    def adapted(model: Any) -> Any:
        from peft import LoraConfig, get_peft_model

        out = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=r".*\.(q_proj|v_proj)$"))
        with torch.no_grad():
            for name, p in out.named_parameters():
                if "lora_" in name:
                    p.copy_((0.05 if "lora_B" in name else 1.0) * normal(32, name, p.shape).to(p))
        return out.eval()

    return _changed(r, t, adapted)


def _changed(r: Recording, t: Trainer, change: Any) -> Made:
    return r, dataclasses.replace(t, change=change), "truncated"


CONTROLS = (
    temperature_forgotten,
    truncation_forgotten,
    stale_weights,
    softcap_lost,
    nested_config_lost,
    adapter_not_merged,
)
