"""Runtime patches for training libraries, each a function and a context manager.

    patch = keep_gradient_checkpointing()          # from here on; patch.undo() takes it back
    with keep_gradient_checkpointing(): ...        # for this block only

Every call returns a `Patch`: true where something was changed, with `changed` naming what, else with the `reason` why
there was nothing to do. Need is decided by looking at the code or its behaviour, never by a version number alone.
Calling twice is harmless, what is undone is exactly what was done, and each outcome is logged once.
"""

import contextlib
import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from parity.fixes.accumulation import divide_by_accumulation
from parity.fixes.logits import use_model_logits
from parity.fixes.padding import mask_padded_log_probs
from parity.fixes.patch import ORIGINAL, Patch
from parity.fixes.teacher import mask_teacher_padding

__all__ = [
    "Patch",
    "divide_by_accumulation",
    "keep_gradient_checkpointing",
    "lift_text_config_attributes",
    "mask_padded_log_probs",
    "mask_teacher_padding",
    "require_input_grads",
    "use_model_logits",
]


def keep_gradient_checkpointing() -> Patch:
    """TRL's switch around generation leaves a model's own checkpointing alone; `len(patch)` names were rebound.

    `trl.models.utils.disable_gradient_checkpointing` ends with `gradient_checkpointing_enable`, which replaces the
    checkpointing function of every module by the stock one and may add an input hook at every call (trl 0.26.0 to
    1.16.0; reported with Unsloth's function and Gemma-4: 1.37e6 for a first loss of 2.46e-8);
    `unwrap_model_for_generation` does the same. Both are replaced by a switch that turns the modules' own flags off and
    back on and touches nothing else, in every module imported so far that took them by value, generated ones outside
    trl included; modules imported later take the replacement. Undoing rebinds both.

    In trl 0.22 to 0.25 only `unwrap_model_for_generation` overwrites. Nothing is done where neither does (up to 0.21, or
    a release that mends it): asked on a stand-in model.
    """
    name = "keep_gradient_checkpointing"
    try:
        utils = importlib.import_module("trl.models.utils")
    except ImportError as error:
        return Patch(name, reason=f"trl cannot be imported ({error})")
    switch = getattr(utils, "disable_gradient_checkpointing", None)
    unwrap = getattr(utils, "unwrap_model_for_generation", None)
    if hasattr(switch, ORIGINAL) or hasattr(unwrap, ORIGINAL):
        return Patch(name, reason="already applied")
    replacements: list[tuple[Any, Any]] = []
    if switch is not None and _overwrites_checkpointing(switch):
        replacements.append((switch, _pausing_switch(switch)))
    if unwrap is not None and _calls(utils, unwrap, "gradient_checkpointing_enable"):
        replacements.append((unwrap, _pausing_unwrap(unwrap)))
    if not replacements:
        return Patch(name, reason="trl's switches no longer overwrite a model's checkpointing")
    changed: list[str] = []
    undo: list[Callable[[], object]] = []
    for original, replacement in replacements:
        changed += rebind(original, replacement)
        undo.append(functools.partial(rebind, replacement, original))
    return Patch(name, changed=tuple(changed), _undo=undo)


@contextlib.contextmanager
def _checkpointing_paused(model: nn.Module) -> Iterator[None]:
    """Turns the `gradient_checkpointing` flag of every module off, then back to what it was; functions stay put."""
    paused = []
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False):
            own = vars(module).get("gradient_checkpointing")
            module.gradient_checkpointing = False
            paused.append((module, own))
    try:
        yield
    finally:
        for module, own in paused:
            if own is None:  # the flag came from the class
                del module.gradient_checkpointing
            else:
                module.gradient_checkpointing = own


def _pausing_switch(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def disable_gradient_checkpointing(model: nn.Module, *args: object, **kwargs: object) -> Any:
        return _checkpointing_paused(model)

    setattr(disable_gradient_checkpointing, ORIGINAL, original)
    return disable_gradient_checkpointing


def _pausing_unwrap(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    @contextlib.contextmanager
    def unwrap_model_for_generation(model: nn.Module, *args: Any, **kwargs: Any) -> Iterator[Any]:
        # With the flags already off the original finds nothing to disable, and so enables nothing afterwards.
        with _checkpointing_paused(model), original(model, *args, **kwargs) as unwrapped:
            yield unwrapped

    setattr(unwrap_model_for_generation, ORIGINAL, original)
    return unwrap_model_for_generation


class _Recorder(nn.Module):
    """A model that checkpoints and writes down what is done to it."""

    supports_gradient_checkpointing = True

    def __init__(self) -> None:
        super().__init__()
        self.gradient_checkpointing = True
        self.enabled = False

    @property
    def is_gradient_checkpointing(self) -> bool:
        return bool(self.gradient_checkpointing)

    is_activation_checkpointing = is_gradient_checkpointing

    def gradient_checkpointing_disable(self) -> None:
        self.gradient_checkpointing = False

    def gradient_checkpointing_enable(self, *args: object, **kwargs: object) -> None:
        self.enabled = True

    activation_checkpointing_disable = gradient_checkpointing_disable
    activation_checkpointing_enable = gradient_checkpointing_enable


def _overwrites_checkpointing(switch: Callable[..., Any]) -> bool:
    model = _Recorder()
    with switch(model, None):
        pass
    return model.enabled


def _calls(module: ModuleType, function: Callable[..., Any], name: str) -> bool:
    """Whether `function`, or a function of `module` that it calls, mentions the attribute `name`."""
    names = set(inspect.unwrap(function).__code__.co_names)
    for helper in [vars(module).get(n) for n in names]:
        if inspect.isfunction(helper) and helper.__module__ == module.__name__:
            names |= set(inspect.unwrap(helper).__code__.co_names)
    return name in names


def rebind(old: object, new: object) -> list[str]:
    """Gives every module-level name that holds `old` the value `new`; returns the names."""
    found = []
    for module_name, module in list(sys.modules.items()):
        namespace = getattr(module, "__dict__", None)  # never getattr by name: it would trigger lazy imports
        if not isinstance(namespace, dict):
            continue
        for name, value in list(namespace.items()):
            if value is old:
                namespace[name] = new
                found.append(f"{module_name}.{name}")
    return found


LIFTED = ("final_logit_softcapping", "logit_scale", "logits_scaling")


def lift_text_config_attributes(model: Any, names: tuple[str, ...] = LIFTED) -> Patch:
    """Copies `names` from a nested text config to the top, where RL code reads them.

    `getattr(config, "final_logit_softcapping", 0)` on a multimodal config misses the value of its text config, and the
    softcap is silently 0 (Unsloth before April 2026; any code that reads it that way). A value that the top level has,
    None included, is never overwritten. `model` is a model, a wrapper around one (`.module`), or a config.
    """
    patch = "lift_text_config_attributes"
    while isinstance(getattr(model, "module", None), nn.Module):
        model = model.module
    config = getattr(model, "config", model)
    text = config.get_text_config() if hasattr(config, "get_text_config") else getattr(config, "text_config", config)
    if text is config or text is None:
        return Patch(patch, reason="the config has no nested text config", model=model)
    lifted = [name for name in names if getattr(text, name, None) is not None and not hasattr(config, name)]
    for name in lifted:
        setattr(config, name, getattr(text, name))
    if not lifted:
        return Patch(patch, reason="no value that is only in the nested text config", model=model)
    changed = tuple(f"config.{name}={getattr(text, name)}" for name in lifted)
    return Patch(patch, changed=changed, model=model, _undo=[functools.partial(delattr, config, n) for n in lifted])


PEFT_STEPS = ("merge", "prepare", "adapt", "checkpoint", "inputs")


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
    name = "require_input_grads"
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
        handle = embeddings.register_forward_hook(_require_grad)
        return Patch(name, (*changed, "hook on the input embeddings"), model=model, _undo=[handle.remove])
    return Patch(name, tuple(changed), reason=None if changed else reason, model=model)


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
    return "the input embeddings' output requires a gradient already" if probe.requires_grad else None
