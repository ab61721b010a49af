"""`scale_logits`: a composite model's logits have the scale that its text model's config asks for."""

from collections.abc import Callable
from typing import Any

import torch

from parity.fixes.logits import in_shards, language_models, probe, undisturbed
from parity.fixes.override import overridden, override
from parity.fixes.patch import ALREADY, Patch

NAME = "scale_logits"


def scale_logits(trainer_or_model: Any) -> Patch:
    """The LM head's output is multiplied by the config's scale where the model's forward leaves it out.

    Aya Vision, Command A Vision, Granite Vision (LLaVA-NeXT over Granite) and Granite Speech (transformers from 4.52 to
    5.24) return `lm_head(hidden)`, (B, T, V); their text models, which the checkpoints were trained as, return
    `scale * lm_head(hidden)`. TRL's fused LM head multiplies by the scale: a policy is trained as another distribution
    than `generate` draws from.

    Need is decided on a probe, 36 tokens, without gradient: nothing is done where the config asks for no scale, where the
    logits are not what the head gives (so that the forward changes them itself), where the probe fails, or under ZeRO-3. The
    head's weight, which fused heads read, is not touched. Accepts a trainer (its model and reference model) or a model.
    """
    changed: list[str] = []
    reasons: list[str] = []
    undo: list[Callable[[], object]] = []
    for model in language_models(trainer_or_model):
        head, scale, kind = model.get_output_embeddings(), logit_scale(model.config), type(model).__name__
        change = overridden(head, "forward", NAME)
        if change is not None:
            reasons.append(ALREADY)
        elif (why := _fine(model, head, scale)) is not None:
            reasons.append(f"{kind}: {why}")
            continue
        else:
            change = override(
                head, "forward", NAME, lambda self, own, *args, by=scale, **kwargs: own(*args, **kwargs) * by
            )
            changed.append(f"{kind} (logits times {scale:g})")
        undo += change.hold(trainer_or_model)
    reason = None if changed else "; ".join(dict.fromkeys(reasons)) or "there is no transformers model"
    return Patch(NAME, tuple(changed), reason=reason, _undo=undo)


def _fine(model: Any, head: Any, scale: float) -> str | None:
    """Why the logits need no scale; None where they do."""
    if scale == 1:
        return "its config scales no logits"
    if in_shards(model):
        return "ZeRO-3 holds it in shards, and no token can be tried"
    given: list[torch.Tensor] = []
    hook = head.register_forward_hook(lambda module, args, out: given.append(out))
    try:
        with undisturbed(model), torch.no_grad():
            found = model.eval()(**probe(model), use_cache=False).logits
    except Exception as error:
        return f"it could not be tried ({type(error).__name__}: {error})"
    finally:
        hook.remove()
    return (
        None if len(given) == 1 and torch.equal(found, given[0].to(found.dtype)) else "its forward scales them itself"
    )


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
