"""`require_input_grads`: reentrant checkpointing that trains although what enters it requires no gradient."""

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from parity.fixes.patch import Change, Patch

NAME = "require_input_grads"
_REQUIRED = "the input embeddings' output requires a gradient already"
_HOOKED: weakref.WeakKeyDictionary[nn.Module, Change] = weakref.WeakKeyDictionary()


def require_input_grads(trainer_or_model: Any) -> Patch:
    """Makes gradient checkpointing train when what enters the checkpointed layers requires no gradient.

    Reentrant checkpointing returns no gradient at all when none of its inputs requires one, as with frozen embeddings:
    "None of the inputs have requires_grad=True", and the learning rate has no effect (GRPO 0.14.0-0.15.2, OnlineDPO up
    to 0.21.0). A forward hook on the input embeddings marks their output. Nothing is done where checkpointing is off or
    not reentrant, where the embeddings' output already requires a gradient (asked of the embeddings themselves), or
    where nothing is trained.
    """
    trainer = None if isinstance(trainer_or_model, nn.Module) else trainer_or_model
    model = trainer_or_model if trainer is None else trainer.model
    reason = _why_inputs_are_fine(model, getattr(trainer, "args", None))
    if reason is None:
        embeddings = model.get_input_embeddings()
        change = _HOOKED[embeddings] = Change(embeddings.register_forward_hook(_require_grad).remove)
        return Patch(NAME, ("hook on the input embeddings",), _undo=change.hold(trainer_or_model))
    made = _HOOKED.get(model.get_input_embeddings()) if reason == _REQUIRED else None
    undo = made.hold(trainer_or_model) if made is not None and made.active else []
    return Patch(NAME, reason=reason, _undo=undo)


def _require_grad(module: nn.Module, inputs: object, output: Tensor) -> None:
    output.requires_grad_(True)


def _first(source: Any, names: tuple[str, ...]) -> Any:
    """The first of these attributes that is there and set: newer spelling first."""
    return next((value for value in (getattr(source, name, None) for name in names) if value), None)


def _why_inputs_are_fine(model: nn.Module, args: Any) -> str | None:
    checkpointed = [m for m in model.modules() if getattr(m, "gradient_checkpointing", False)]
    planned = _first(args, ("activation_checkpointing", "gradient_checkpointing"))
    if not checkpointed and not planned:
        return "gradient checkpointing is off"
    functions = [getattr(m, "_gradient_checkpointing_func", None) for m in checkpointed]
    options = [getattr(f, "keywords", {}) for f in functions if f is not None]
    if planned or not options:  # a trainer turns it on again with its own options when training starts
        options = [_first(args, ("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs")) or {}]
    if all(o.get("use_reentrant") is False for o in options):
        return "checkpointing is not reentrant"
    if not any(p.requires_grad for p in model.parameters()):
        return "the model has no trainable parameter"
    embeddings = model.get_input_embeddings()
    with torch.enable_grad():
        probe = embeddings(torch.zeros((1, 1), dtype=torch.long, device=embeddings.weight.device))
    return _REQUIRED if probe.requires_grad else None
