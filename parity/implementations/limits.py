"""What the installed release of a library takes of a case's settings, each thing that it does not a `Limit`; and what it has
under a name, of which it is asked by its signature or the text of its errors."""

import functools
import importlib
import importlib.util
import inspect
import operator
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from parity.errors import HarnessError, Unsupported

Limit = Callable[[Any], str]
"""Every setting of a case, with its `dtype` and the `device` -> why it is not taken; empty where it is."""


def only(reason: str, holds: Callable[[Any], bool]) -> Limit:
    """The limit that something must hold of the settings."""
    return lambda s: "" if holds(s) else reason


def fitting(path: str, wanted: Callable[[Any], Mapping[str, tuple[Any, Any]]]) -> Limit:
    """The limit that the installed function at MODULE:NAME has the parameters that settings want, see `lacking`."""
    return lambda s: lacking(function, wanted(s)) if (function := found_at(path)) is not None else ""


@functools.cache
def found_at(path: str) -> Any:
    """What is at MODULE:NAME in the installed version; None where nothing is."""
    try:
        return accepted(path)
    except (ImportError, AttributeError, Unsupported):
        return None


@functools.cache
def says(module: str, text: str) -> bool:
    """Whether the source of an installed module has a text, such as the message of an error that it raises."""
    found = importlib.util.find_spec(module)
    return found is not None and found.origin is not None and text in Path(found.origin).read_text(encoding="utf-8")


def refused(module: str, text: str, holds: Callable[[Any], bool]) -> Limit:
    """The limit that something must hold of the settings where an installed module has the text of an error about it."""
    return only(f"it refuses: {text}", lambda s: holds(s) or not says(module, text))


def known_loss_type(module: str, text: str = "Unknown loss type") -> Limit:
    """The limit that an installed module which refuses unknown loss types names that of the case."""
    return refused(module, text, lambda s: says(module, f'"{s.loss_type}"'))


ONE_WEIGHT = only("a bare loss takes one weight, no adapter on the head", lambda s: s.head != "lora")
ONE_DTYPE = only("hidden states and head of one dtype only", lambda s: s.head_dtype == "same" or s.dtype == "fp32")


def require(condition: bool, reason: str) -> None:
    """Raise `Unsupported(reason)` unless the condition holds. For what tensors decide: what settings do is a `Limit`."""
    if not condition:
        raise Unsupported(reason)


def accepted(path: str) -> Any:
    """What is at MODULE:NAME, or `Unsupported` saying that the installed version has no such name."""
    module, _, name = path.partition(":")
    place = importlib.import_module(module)
    try:
        return operator.attrgetter(name)(place)
    except AttributeError:
        raise Unsupported(f"{module} has no {name} in the installed version") from None


def lacking(function: Any, required: Mapping[str, tuple[Any, Any]]) -> str:
    """Why the installed signature does not take name -> (value, default): a parameter that it lacks must be at its default."""
    known = _parameters(function)
    for name, (value, default) in required.items():
        at_default = value is default or (not isinstance(value, torch.Tensor) and value == default)
        if name not in known and not at_default:
            return f"no {name} parameter in the installed version"
    return ""


@functools.lru_cache
def _parameters(function: Any) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(function).parameters


def taking(function: Any, required: Mapping[str, tuple[Any, Any]]) -> dict[str, Any]:
    """Keyword arguments for the installed signature, from name -> (value, default). Raises HarnessError where it lacks
    one that is not at its default, although no limit of the implementation says so."""
    if lacks := lacking(function, required):
        raise HarnessError(f"a setting is declared as taken and is not: {lacks}")
    known = _parameters(function)
    return {name: value for name, (value, _) in required.items() if name in known}
