"""`scale_logits`: a composite model's logits have the scale that its text model's config asks for."""

import copy
from typing import Any

import torch

from parity.fixes.language_models import change_each, in_shards, probe, undisturbed
from parity.fixes.patch import Change, Patch

NAME = "scale_logits"
_ROUNDED = 4
"""Units of the logits' dtype by which scaled ones may be off from the text model's, in norm."""


def scale_logits(trainer_or_model: Any) -> Patch:
    """The LM head's output is multiplied by the scale that a composite model's forward leaves out.

    Aya Vision, Command A Vision, Granite Vision (LLaVA-NeXT over Granite) and Granite Speech (transformers from 4.52 to
    5.24) return `lm_head(hidden)`, (B, T, V); their text models, which the checkpoints were trained as, return
    `scale * lm_head(hidden)`. TRL's fused LM head multiplies by the scale: a policy is trained as another distribution
    than `generate` draws from.

    Need is decided on a probe, 36 tokens, without gradient, through the model and through the class of its text model made of
    the same modules. Nothing is done for a text model, where the two agree, where the scale is not what they differ by, where
    the probe fails, or under ZeRO-3. The scale is a forward hook on the head, which copies and pickles keep; fused heads read
    the weight, which is not touched. After a head's adapter is merged, apply again. Accepts a trainer (its model and
    reference model) or a model.
    """
    return change_each(NAME, trainer_or_model, _there, _why_not, _scaled)


def _there(model: Any) -> Change | None:
    hooks = model.get_output_embeddings()._forward_hooks.values()
    return next((hook.change for hook in hooks if isinstance(hook, _Scaled) and hook.change.active), None)


def _scaled(model: Any) -> tuple[Change, str]:
    hook = _Scaled(logit_scale(model.config))
    hook.change.back.append(model.get_output_embeddings().register_forward_hook(hook).remove)
    return hook.change, f"logits times {hook.scale:g}"


class _Scaled:
    """A forward hook. A copy of its module goes with the change; a pickled one keeps the scale."""

    def __init__(self, scale: float) -> None:
        self.scale, self.change = scale, Change()

    def __call__(self, module: Any, args: Any, out: torch.Tensor) -> torch.Tensor:
        return out * self.scale if self.change.active else out

    def __deepcopy__(self, memo: Any) -> "_Scaled":
        return self

    def __reduce__(self) -> Any:
        return _Scaled, (self.scale,)


def _why_not(model: Any) -> str | None:
    """Why the logits need no scale; None where they do."""
    if model.config.get_text_config() is model.config:
        return "it is a text model"
    scale = logit_scale(model.config)
    if scale == 1:
        return "its config scales no logits"
    if in_shards(model):
        return "ZeRO-3 holds it in shards, and no token can be tried"
    try:
        head = model.get_output_embeddings()
        alone = _text_model(model, head)
        with undisturbed(model), torch.no_grad():
            own, right = (m.eval()(**probe(model), use_cache=False).logits.double() for m in (model, alone))
            eps = torch.finfo(next(head.parameters()).dtype).eps
    except Exception as error:
        return f"it could not be tried ({type(error).__name__}: {error})"
    near = _ROUNDED * eps * right.norm()
    if (own - right).norm() <= near:
        return "its logits are its text model's"
    return (
        None if (scale * own - right).norm() <= near else "its logits differ from its text model's by more than a scale"
    )


def _text_model(model: Any, head: Any) -> Any:
    """The class of the text model with the modules of `model`; nothing is allocated."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        alone = AutoModelForCausalLM.from_config(copy.deepcopy(model.config.get_text_config()))
    name = alone.base_model_prefix
    inside = (m for m in model.modules() if type(m) is type(getattr(alone, name)))
    setattr(alone, name, next(inside))
    bare = copy.copy(head)  # without hooks, of which one may scale
    bare._forward_hooks = {}
    alone.set_output_embeddings(bare)
    return alone


def logit_scale(config: Any) -> float:
    """The factor of the logits, before a softcap, that a model's config asks for; 1 where it names no number.

    `logit_scale` (Cohere), `output_multiplier`, `lm_head_multiplier` (Falcon-H1) multiply; `logits_scaling` divides
    (Granite; MiniCPM3: the hidden states), except in HyperCLOVA X.
    """
    text = config.get_text_config()
    for name in ("logit_scale", "output_multiplier", "lm_head_multiplier"):
        value = getattr(text, name, None)
        if isinstance(value, int | float):
            return float(value)
    divisor = getattr(text, "logits_scaling", None)
    if divisor is None:
        return 1.0
    return float(divisor) if text.model_type == "hyperclovax" else 1 / float(divisor)
