"""Put our policy loss into TRL's trainers, in place of Liger's.

Nothing else of the trainer changes: it goes on reading its model's config, masking, gathering and logging.
"""

import contextlib
import dataclasses
from typing import Any

import torch
from torch import Tensor

from parity.fixes.grpo import FusedLinearGRPOLoss
from parity.fixes.override import already, override
from parity.fixes.patch import Patch
from parity.fixes.scale import logit_scale

NAME = "use_fused_policy_loss"

_LOSS_ATTRIBUTES = ("liger_loss", "liger_grpo_loss")
_NOT_ITS = {"compiled", "chunk_size", "memory_budget", "current_gradient_accumulation_steps", "steps_per_generation"}
"""Settings of the loss that no trainer has, or that it hands over in the call."""


def use_fused_policy_loss(trainer: Any) -> Patch:
    """A GRPO trainer on its Liger path (trl 0.17 to 1.13) computes its loss with `FusedLinearGRPOLoss`.

    Repairs what that path drops: the sampler's importance ratio and the tool mask (0.23 to 0.28), the generation
    batch's token count (0.22 to 1.10), the KL's bias correction (0.26 to 1.3), softcap and logit scale (all). The
    trainer's own method still computes the hidden states and logs `kl` and `clip_ratio`; the other metrics of the
    plain path are logged as well.
    """
    attribute = next((a for a in _LOSS_ATTRIBUTES if getattr(trainer, a, None) is not None), None)
    if attribute is None or not hasattr(trainer, "compute_liger_loss"):
        return Patch(NAME, reason="the trainer has no fused loss (Liger not asked for, or not a path of this TRL)")
    if (done := already(trainer, NAME, trainer, "compute_liger_loss")) is not None:
        return done
    original = getattr(trainer, attribute)
    head = trainer.accelerator.unwrap_model(trainer.model).get_output_embeddings()
    if hasattr(head, "base_layer"):
        return Patch(NAME, reason="the LM head carries an adapter, and the fused path reads only the weight below it")
    if hasattr(head.weight, "ds_id"):
        return Patch(NAME, reason="ZeRO-3 partitions the LM head, which the backward would need whole")
    replacement = _TrainerLoss(trainer)
    setattr(trainer, attribute, replacement)
    change = override(trainer, "compute_liger_loss", NAME, replacement.compute)

    def back() -> None:
        if getattr(trainer, attribute) is replacement:
            setattr(trainer, attribute, original)

    change.back.append(back)
    return Patch(NAME, changed=(f"{type(trainer).__name__}.{attribute}",), _undo=change.hold(trainer))


class _TrainerLoss:
    """The loss object of a trainer: called as Liger's, it takes from the batch what the trainer does not pass on."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.inputs: dict[str, Any] = {}
        self.loss: Tensor | None = None
        config = trainer.accelerator.unwrap_model(trainer.model).config
        known = {f.name: f.default for f in dataclasses.fields(FusedLinearGRPOLoss) if f.name not in _NOT_ITS}
        known["loss_type"] = "bnpo"  # 0.17 had no other
        settings = {name: self._setting(name, default) for name, default in known.items()}
        softcap = getattr(config.get_text_config(), "final_logit_softcapping", None)
        more = {"use_ref_model": trainer.beta != 0.0, "softcap": softcap, "logit_scale": logit_scale(config)}
        self.fused = FusedLinearGRPOLoss(**settings | more)

    def _setting(self, name: str, default: Any) -> Any:
        return getattr(self.trainer, name, getattr(self.trainer.args, name, default))

    def compute(self, trainer: Any, original: Any, model: Any, inputs: dict[str, Any]) -> Tensor:
        """`compute_liger_loss`: the trainer's own forward and logging; the loss is ours, its normaliser included."""
        self.inputs = inputs
        try:
            original(model, inputs)
            assert self.loss is not None
            return self.loss
        finally:
            self.inputs, self.loss = {}, None

    def __call__(self, _input: Tensor, lin_weight: Tensor, **call: Any) -> tuple[Tensor, Any]:
        inputs, trainer = self.inputs, self.trainer
        self.fused.train(trainer.model.training)
        self.fused.entropy_coef = self._setting("entropy_coef", 0.0)
        mask = inputs["completion_mask"]
        if inputs.get("tool_mask") is not None:
            mask = mask * inputs["tool_mask"]
        call |= {
            "attention_mask": mask,
            "vllm_is_ratio": inputs.get("importance_sampling_ratio"),
            "num_items_in_batch": inputs.get("num_items_in_batch"),
            "sampling_per_token_logps": inputs.get("sampling_per_token_logps"),
        }
        # Up to 0.21 the Trainer itself divides by the accumulation steps, unless it is told not to.
        if getattr(trainer, "compute_loss_func", None) is not None:
            call["current_gradient_accumulation_steps"] = getattr(trainer, "current_gradient_accumulation_steps", 1)
            call["steps_per_generation"] = getattr(trainer.args, "steps_per_generation", None)
        whole = getattr(trainer.args, "cast_lm_head_to_fp32", False)
        outside = torch.autocast(_input.device.type, enabled=False) if whole else contextlib.nullcontext()
        with outside:
            self.loss, metrics = self.fused(_input, lin_weight, **call)
        logged = trainer._metrics["train" if trainer.model.training else "eval"]
        for name, value in metrics.items():
            if name != "kl":
                logged[name].append(value.item())
        return self.loss, metrics
