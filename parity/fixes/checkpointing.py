"""`keep_gradient_checkpointing`: generation leaves a model's own checkpointing alone."""

import contextlib
import functools
import importlib
import inspect
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any
from unittest import mock

from torch import nn

from parity.fixes.override import rebind
from parity.fixes.patch import ALREADY, ORIGINAL, Change, Patch

NAME = "keep_gradient_checkpointing"
_CHANGE = "_parity_change"
_ENABLING = "gradient_checkpointing_enable", "activation_checkpointing_enable"


class _Kept(Change):
    """The replaced switches, and whose models they leave alone: everyone's where nobody holds them by name, or their holders'."""

    changed: tuple[str, ...] = ()

    @property
    def everyone(self) -> bool:
        return any(type(holder()) is object for holder in self.holders)

    def covers(self, model: Any) -> bool:
        """Whether one of the holders' models is this one, wraps it or is wrapped by it."""
        if self.everyone:
            return True
        if not isinstance(model, nn.Module):
            return False
        ours = [_model(holder()) for holder in self.holders]
        theirs = set(model.modules())
        return any(isinstance(module, nn.Module) and not theirs.isdisjoint(module.modules()) for module in ours)


def _model(owner: Any) -> Any:
    return owner if isinstance(owner, nn.Module) else getattr(owner, "model", None)


def keep_gradient_checkpointing(trainer_or_model: Any = None) -> Patch:
    """TRL's switch around generation leaves a model's own checkpointing alone; `len(patch)` names were rebound.

    `trl.models.utils.disable_gradient_checkpointing` ends with `gradient_checkpointing_enable`, which replaces the
    checkpointing function of every module by the stock one and may add an input hook at every call (trl 0.26.0 to
    1.16.0; reported with Unsloth's function and Gemma-4: 1.37e6 for a first loss of 2.46e-8);
    `unwrap_model_for_generation` does the same. Both are replaced by a switch that turns the modules' own flags off and
    back on and touches nothing else, in every module imported so far that took them by value, generated ones outside
    trl included; modules imported later take the replacement. Undoing rebinds both.

    With a trainer or a model, for its model alone: any other goes through TRL's switch. Without, for every model.

    In trl 0.22 to 0.25 only `unwrap_model_for_generation` overwrites. Nothing is done where neither does (up to 0.21, or
    a release that repairs it): their code is read.
    """
    try:
        utils = importlib.import_module("trl.models.utils")
    except ImportError as error:
        return Patch(NAME, reason=f"trl cannot be imported ({error})")
    switch = getattr(utils, "disable_gradient_checkpointing", None)
    unwrap = getattr(utils, "unwrap_model_for_generation", None)
    kept = getattr(switch, _CHANGE, None) or getattr(unwrap, _CHANGE, None)
    if kept is not None:
        covered = kept.everyone if trainer_or_model is None else kept.covers(_model(trainer_or_model))
        let_go = kept.hold(trainer_or_model)
        if covered:
            return Patch(NAME, reason=ALREADY, _undo=let_go)
        return Patch(NAME, changed=kept.changed, _undo=let_go)
    kept = _Kept()
    replacements: list[tuple[Any, Any]] = []
    if switch is not None and _enables_checkpointing(utils, switch):
        replacements.append((switch, _pausing_switch(switch, kept)))
    if unwrap is not None and _enables_checkpointing(utils, unwrap):
        replacements.append((unwrap, _pausing_unwrap(unwrap, kept)))
    if not replacements:
        return Patch(NAME, reason="trl's switches no longer overwrite a model's checkpointing")
    for original, replacement in replacements:
        setattr(replacement, ORIGINAL, original)
        setattr(replacement, _CHANGE, kept)
        kept.changed += tuple(rebind(original, replacement))
        kept.back.append(functools.partial(rebind, replacement, original))
    return Patch(NAME, changed=kept.changed, _undo=kept.hold(trainer_or_model))


@contextlib.contextmanager
def _checkpointing_paused(model: nn.Module) -> Iterator[None]:
    """Turns the `gradient_checkpointing` flag of every module off, then back to what it was; functions stay put."""
    with contextlib.ExitStack() as paused:
        for module in model.modules():
            if getattr(module, "gradient_checkpointing", False):
                paused.enter_context(mock.patch.object(module, "gradient_checkpointing", False))
        yield


def _pausing_switch(original: Callable[..., Any], kept: _Kept) -> Callable[..., Any]:
    @functools.wraps(original)
    def disable_gradient_checkpointing(model: nn.Module, *args: object, **kwargs: object) -> Any:
        return _checkpointing_paused(model) if kept.covers(model) else original(model, *args, **kwargs)

    return disable_gradient_checkpointing


def _pausing_unwrap(original: Callable[..., Any], kept: _Kept) -> Callable[..., Any]:
    @functools.wraps(original)
    @contextlib.contextmanager
    def unwrap_model_for_generation(model: nn.Module, *args: Any, **kwargs: Any) -> Iterator[Any]:
        # With the flags already off the original finds nothing to disable, and so enables nothing afterwards.
        paused = _checkpointing_paused(model) if kept.covers(model) else contextlib.nullcontext()
        with paused, original(model, *args, **kwargs) as unwrapped:
            yield unwrapped

    return unwrap_model_for_generation


def _enables_checkpointing(module: ModuleType, function: Callable[..., Any]) -> bool:
    """Whether `function`, or a function of `module` that it calls, mentions a model's method that turns checkpointing on."""
    names = set(inspect.unwrap(function).__code__.co_names)
    for helper in [vars(module).get(n) for n in names]:
        if inspect.isfunction(helper) and helper.__module__ == module.__name__:
            names |= set(inspect.unwrap(helper).__code__.co_names)
    return not names.isdisjoint(_ENABLING)
