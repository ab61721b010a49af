"""`lift_text_config_attributes`: values of a nested text config where code reads them, and never in a saved file."""

import copy
import functools
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

from parity.fixes.patch import Change, Patch

NAME = "lift_text_config_attributes"
LIFTED = ("final_logit_softcapping", "logit_scale", "logits_scaling")


class _Lifts(Change):
    """The names lifted in one config, and in its deep copies."""

    def __init__(self, *back: Callable[[], object]) -> None:
        super().__init__(*back)
        self.names: frozenset[str] = frozenset()


_LIFTS: dict[int, tuple[weakref.ref[Any], _Lifts]] = {}  # by identity: configs compare by value and have no hash


def _lifts(config: Any) -> _Lifts | None:
    held = _LIFTS.get(id(config))
    return held[1] if held is not None and held[0]() is config and held[1].active else None


def _register(config: Any, lifts: _Lifts) -> None:
    key = id(config)
    _LIFTS[key] = (weakref.ref(config, lambda _: _LIFTS.pop(key, None)), lifts)


class _Lifted:
    """On a config class: the attribute of the configs that were lifted, read from the text config; others have none.

    Nothing is written into the config itself, so neither `to_dict` nor a saved config.json knows of it. A value that the
    config gets of its own comes first.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, config: Any, kind: type) -> Any:
        lifts = None if config is None else _lifts(config)
        if lifts is None or self.name not in lifts.names:
            raise AttributeError(f"{kind.__name__!r} object has no attribute {self.name!r}")
        return getattr(_text(config), self.name)


class _Copier:
    """On a config class: deep copies of a lifted config are lifted too."""

    def __get__(self, config: Any, kind: type) -> Any:
        lifts = None if config is None else _lifts(config)
        if lifts is None:
            raise AttributeError("__deepcopy__")

        def deepcopy(memo: dict[int, Any]) -> Any:
            held = _LIFTS.pop(id(config))  # the plain way of copying, for once
            try:
                twin = copy.deepcopy(config, memo)
            finally:
                _LIFTS[id(config)] = held
            _register(twin, lifts)
            return twin

        return deepcopy


def lift_text_config_attributes(model: Any, *, owner: Any = None) -> Patch:
    """`config.name` reads the names `LIFTED` of a nested text config, where RL code looks for them.

    `getattr(config, "final_logit_softcapping", 0)` on a multimodal config misses the value of its text config, and the
    softcap is silently 0 (Unsloth before April 2026; any code that reads it that way). A value that the top level has,
    None included, is never overwritten. `model` is a model, a wrapper around one (`.module`), or a config. Only this
    config, and deep copies of it, answer; what is saved of it is as without the patch. `owner` is who holds the patch, `model`
    itself if None: what two of them lift in one config stays until both have undone it.
    """
    owner = model if owner is None else owner
    while isinstance(getattr(model, "module", None), nn.Module):
        model = model.module
    config = getattr(model, "config", model)
    text = _text(config)
    if text is config or text is None:
        return Patch(NAME, reason="the config has no nested text config")
    lifts = _lifts(config)
    lifted = [name for name in LIFTED if getattr(text, name, None) is not None and not hasattr(config, name)]
    if not lifted:
        held: list[Callable[[], object]] = []
        if lifts is not None and lifts.names:
            held = lifts.hold(owner)
        return Patch(NAME, reason="no value that is only in the nested text config", _undo=held)
    kind = type(config)
    lifts = lifts or _Lifts(functools.partial(_clean, kind))
    _register(config, lifts)
    lifts.names |= set(lifted)
    for name in lifted:
        if name not in vars(kind):
            setattr(kind, name, _Lifted(name))
    if not hasattr(kind, "__deepcopy__"):
        kind.__deepcopy__ = _Copier()
    changed = tuple(f"config.{name}={getattr(text, name)}" for name in lifted)
    return Patch(NAME, changed=changed, _undo=lifts.hold(owner))


def _clean(kind: type) -> None:
    """Takes what reads lifted values off a config class of which no config is lifted any more."""
    if any(lifts.active and type(config()) is kind for config, lifts in _LIFTS.values()):
        return
    for name, value in list(vars(kind).items()):
        if isinstance(value, (_Lifted, _Copier)):
            delattr(kind, name)


def _text(config: Any) -> Any:
    return config.get_text_config() if hasattr(config, "get_text_config") else getattr(config, "text_config", config)
