"""`require_input_grads`: reentrant checkpointing that trains although what enters it requires no gradient."""

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from parity.fixes.patch import Change, Patch

NAME = "require_input_grads"
PEFT_STEPS = ("merge", "prepare", "adapt", "checkpoint", "inputs")
_REQUIRED = "the input embeddings' output requires a gradient already"
_HOOKED: weakref.WeakKeyDictionary[nn.Module, Change] = weakref.WeakKeyDictionary()


def require_input_grads(
    trainer_or_model: Any,
    peft_config: Any = None,
    gradient_checkpointing_kwargs: dict[str, Any] | None = None,
    steps: tuple[str, ...] = PEFT_STEPS,
) -> Patch:
    """Makes gradient checkpointing train when what enters the checkpointed layers requires no gradient.

    Reentrant checkpointing returns no gradient at all when none of its inputs requires one, as with frozen embeddings:
    "None of the inputs have requires_grad=True", and the learning rate has no effect (GRPO 0.14.0-0.15.2, OnlineDPO up
    to 0.21.0). A forward hook on the input embeddings marks their output. Nothing is done where checkpointing is off or
    not reentrant, where the embeddings' output already requires a gradient (asked of the embeddings themselves), or
    where nothing is trained.

    With `peft_config`, first the steps that lead to a PEFT model, in order: "merge" an existing adapter into the base
    (logits unchanged; a quantised base rounds the merged weights to its grid again), "prepare" with
    `peft.prepare_model_for_kbit_training` (a model that is not quantised is frozen and its 16-bit parameters become
    float32), "adapt" with `get_peft_model`, "checkpoint" to turn checkpointing on in the wrapped model with
    `gradient_checkpointing_kwargs`, "inputs" for the hook. They are not undone; the hook is. `patch.model` is the model
    to train; a trainer is given it, unless its optimizer exists already (ValueError).
    """
    trainer = None if isinstance(trainer_or_model, nn.Module) else trainer_or_model
    model = trainer_or_model if trainer is None else trainer.model
    args = getattr(trainer, "args", None)
    given = gradient_checkpointing_kwargs or _first(
        args, ("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs")
    )
    changed: list[str] = []
    if peft_config is not None:
        if trainer is not None and trainer.optimizer is not None:
            raise ValueError("peft_config: the trainer has an optimizer already, over the old model's parameters")
        model, changed = _adapt(model, peft_config, given, steps)
        if trainer is not None:
            trainer.model = trainer.model_wrapped = model
    reason = _why_inputs_are_fine(model, args, given)
    if reason is None and "inputs" in steps:
        embeddings = model.get_input_embeddings()
        change = _HOOKED[embeddings] = Change(embeddings.register_forward_hook(_require_grad).remove)
        return Patch(NAME, (*changed, "hook on the input embeddings"), model=model, _undo=change.hold(trainer_or_model))
    made = _HOOKED.get(model.get_input_embeddings()) if reason == _REQUIRED else None
    undo = made.hold(trainer_or_model) if made is not None and made.active else []
    return Patch(NAME, tuple(changed), reason=None if changed else reason, model=model, _undo=undo)


def _require_grad(module: nn.Module, inputs: object, output: Tensor) -> None:
    output.requires_grad_(True)


def _first(source: Any, names: tuple[str, ...]) -> Any:
    """The first of these attributes that is there and set: newer spelling first."""
    return next((value for value in (getattr(source, name, None) for name in names) if value), None)


def _adapt(
    model: Any, peft_config: Any, kwargs: dict[str, Any] | None, steps: tuple[str, ...]
) -> tuple[Any, list[str]]:
    import peft

    changed = []
    if isinstance(model, peft.PeftModel) and "merge" in steps:
        model = model.merge_and_unload()
        changed.append("merged the existing adapter")
    if "prepare" in steps:
        quantised = getattr(model, "is_loaded_in_8bit", False) or getattr(model, "is_loaded_in_4bit", False)
        # Checkpointing is switched on below, on the wrapped model, whether or not it is quantised.
        model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
        changed.append(f"prepared for k-bit training ({'quantised' if quantised else 'not quantised'})")
    if "adapt" in steps:
        model = peft.get_peft_model(model, peft_config)
        changed.append("applied the PEFT config")
    if "checkpoint" in steps:
        newer = getattr(model, "activation_checkpointing_enable", None)
        if newer is not None:
            newer(activation_checkpointing_kwargs=kwargs)
        else:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
        changed.append("checkpointing on in the wrapped model")
    return model, changed


def _why_inputs_are_fine(model: nn.Module, args: Any, given: dict[str, Any] | None) -> str | None:
    checkpointed = [m for m in model.modules() if getattr(m, "gradient_checkpointing", False)]
    planned = _first(args, ("activation_checkpointing", "gradient_checkpointing"))
    if not checkpointed and not planned:
        return "gradient checkpointing is off"
    functions = [getattr(m, "_gradient_checkpointing_func", None) for m in checkpointed]
    options = [getattr(f, "keywords", {}) for f in functions if f is not None]
    if planned or not options:  # a trainer turns it on again with its own options when training starts
        options = [given or {}]
    if all(o.get("use_reentrant") is False for o in options):
        return "checkpointing is not reentrant"
    if not any(p.requires_grad for p in model.parameters()):
        return "the model has no trainable parameter"
    embeddings = model.get_input_embeddings()
    with torch.enable_grad():
        probe = embeddings(torch.zeros((1, 1), dtype=torch.long, device=embeddings.weight.device))
    return _REQUIRED if probe.requires_grad else None
