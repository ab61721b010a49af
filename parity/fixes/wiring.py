"""Our losses in the places that TRL's trainers have for one: the fused LM head, and the loss object of the Liger path.

Nothing else of the trainer changes: it goes on reading its model's config, masking, gathering and logging.
"""

import contextlib
import functools
import importlib
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from parity.fixes.grpo import FusedLinearGRPOLoss
from parity.fixes.logprobs import selective_log_probs
from parity.fixes.patch import ORIGINAL, Patch
from parity.fixes.patches import rebind

_ENTROPY = "entropy"


class _LogProbFunction:
    """Answers `ChunkedLogProbFunction.apply` with `selective_log_probs`; what that has no output for stays TRL's."""

    def __init__(self, original: Any) -> None:
        self.original = original
        self.signature = inspect.signature(original.forward)  # bias since 1.13, outputs since 1.15
        self.optional = getattr(sys.modules[original.__module__], "OPTIONAL_OUTPUTS", (_ENTROPY,))
        setattr(self, ORIGINAL, original)

    def apply(self, *args: Any) -> Any:
        call = self.signature.bind(None, *args)
        call.apply_defaults()
        _, hidden, weight = call.args[:3]
        given = call.arguments
        wanted = given.get("outputs", self.optional)
        if set(wanted) - {"log_probs", _ENTROPY} or hasattr(weight, "ds_id"):
            return self.original.apply(*args)
        found = selective_log_probs(
            hidden,
            weight,
            given["targets"],
            bias=given.get("bias"),
            temperature=given["temperature"],
            softcap=given.get("final_logit_softcapping"),
            logit_scale=given.get("logit_scale", 1.0),
            entropy=_ENTROPY in wanted,
        )
        logps, entropies = found if isinstance(found, tuple) else (found, None)
        return logps, *(entropies if name == _ENTROPY else None for name in self.optional)


def use_selective_log_probs() -> Patch:
    """TRL's fused LM head (GRPO: 1.14 on) takes log-probs and entropies from `selective_log_probs`.

    TRL's kernel keeps tiles of logits and their gradient in the dtype of the hidden states, and its entropy is NaN as
    soon as one logit is -inf; with the entropy bonus on, so are loss and gradients (1.16.0). For the whole process:
    every name that holds the kernel is rebound. Calls for an output that we do not have (SFT's accuracy, DPO's mean
    logits) and heads that ZeRO-3 partitions keep TRL's kernel.
    """
    name = "use_selective_log_probs"
    try:
        utils = importlib.import_module("trl.trainer.utils")
    except ImportError as error:
        return Patch(name, reason=f"trl cannot be imported ({error})")
    original = getattr(utils, "_ChunkedLogProbFunction", None)
    if original is None:
        return Patch(name, reason="this TRL has no fused LM head: its log-probs come from full logits")
    if hasattr(original, ORIGINAL):
        return Patch(name, reason="already applied")
    replacement = _LogProbFunction(original)
    changed = rebind(original, replacement)
    return Patch(name, changed=tuple(changed), _undo=[functools.partial(rebind, replacement, original)])


def head_is_in_the_model() -> bool:
    """Whether TRL puts its fused LM head into a model's forward (1.15 on), where it can be seen; else into the trainer."""
    return hasattr(sys.modules.get("trl.trainer.utils"), "add_fused_lm_head")


_LOSS_ATTRIBUTES = ("liger_loss", "liger_grpo_loss")
_TRAINER_SETTINGS = {
    "loss_type": "bnpo",  # 0.17 had no other
    "max_completion_length": None,
    "importance_sampling_level": "token",
    "sapo_temperature_pos": 1.0,
    "sapo_temperature_neg": 1.05,
    "delta": None,
    "use_bias_correction_kl": False,
    "vespo_k_pos": 2.0,
    "vespo_lambda_pos": 3.0,
    "vespo_k_neg": 3.0,
    "vespo_lambda_neg": 2.0,
    "off_policy_mask_threshold": None,
    "top_entropy_quantile": 1.0,
    "entropy_coef": 0.0,
}


def use_fused_policy_loss(trainer: Any) -> Patch:
    """A GRPO trainer on its Liger path (trl 0.17 to 1.13) computes its loss with `FusedLinearGRPOLoss`.

    Repairs what that path drops: the sampler's importance ratio and the tool mask (0.23 to 0.28), the generation
    batch's token count (0.22 to 1.10), the KL's bias correction (0.26 to 1.3), softcap and logit scale (all). The
    trainer's own method still computes the hidden states and logs `kl` and `clip_ratio`; the other metrics of the
    plain path are logged as well.
    """
    name = "use_fused_policy_loss"
    attribute = next((a for a in _LOSS_ATTRIBUTES if getattr(trainer, a, None) is not None), None)
    if attribute is None or not hasattr(trainer, "compute_liger_loss"):
        return Patch(name, reason="the trainer has no fused loss (Liger not asked for, or not a path of this TRL)")
    original = getattr(trainer, attribute)
    if isinstance(original, _TrainerLoss):
        return Patch(name, reason="already applied")
    head = trainer.accelerator.unwrap_model(trainer.model).get_output_embeddings()
    if hasattr(head, "base_layer"):
        return Patch(name, reason="the LM head carries an adapter, and the fused path reads only the weight below it")
    if hasattr(head.weight, "ds_id"):
        return Patch(name, reason="ZeRO-3 partitions the LM head, which the backward would need whole")
    replacement = _TrainerLoss(trainer)
    setattr(trainer, attribute, replacement)
    trainer.compute_liger_loss = replacement.compute
    undo: list[Callable[[], object]] = [
        functools.partial(setattr, trainer, attribute, original),
        functools.partial(delattr, trainer, "compute_liger_loss"),
    ]
    return Patch(name, changed=(f"{type(trainer).__name__}.{attribute}",), model=trainer.model, _undo=undo)


class _TrainerLoss:
    """The loss object of a trainer: called as Liger's, it takes from the batch what the trainer does not hand over."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.original = trainer.compute_liger_loss
        self.inputs: dict[str, Any] = {}
        self.loss: Tensor | None = None
        config = trainer.accelerator.unwrap_model(trainer.model).config
        self.fused = FusedLinearGRPOLoss(
            beta=trainer.beta,
            use_ref_model=trainer.beta != 0.0,
            epsilon_low=trainer.epsilon_low,
            epsilon_high=trainer.epsilon_high,
            temperature=trainer.temperature,
            softcap=getattr(config.get_text_config(), "final_logit_softcapping", None),
            logit_scale=logit_scale(config),
            **{name: self._setting(name, default) for name, default in _TRAINER_SETTINGS.items()},
        )

    def _setting(self, name: str, default: Any) -> Any:
        return getattr(self.trainer, name, getattr(self.trainer.args, name, default))

    def compute(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        """`compute_liger_loss`: the trainer's own forward and logging; the loss is ours, its normaliser included."""
        self.inputs = inputs
        try:
            self.original(model, inputs)
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


def logit_scale(config: Any) -> float:
    """The factor between LM head and softcap that a model's config asks for, 1 where it names none.

    `logit_scale` (Cohere), `output_multiplier`, `lm_head_multiplier` (Falcon-H1) multiply; `logits_scaling` divides
    (Granite, MiniCPM3), except in HyperCLOVA X.
    """
    text = config.get_text_config()
    for name in ("logit_scale", "output_multiplier", "lm_head_multiplier"):
        value = getattr(text, name, None)
        if value is not None:
            return float(value)
    divisor = getattr(text, "logits_scaling", None)
    if divisor is None:
        return 1.0
    return float(divisor) if text.model_type == "hyperclovax" else 1 / float(divisor)
