"""Replacing a method of one object, where others of its class stay as they are, or a function under all of its names."""

import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

from parity.fixes.patch import ALREADY, Change, Patch, reference

_CHANGES = "_parity_changes"  # on a replacement: the changes that it stands for, by the name of the fix


def source_of(function: Any) -> str:
    """The source of a function or method; empty where it has none that can be read."""
    try:
        return inspect.getsource(function)
    except (OSError, TypeError):
        return ""


def override(owner: Any, name: str, fix: str, ours: Callable[..., Any]) -> Change:
    """`owner.name(...)` becomes `ours(self, original, ...)` until the change is taken back, for this one object.

    `original` is what was there, bound to `self`: a deep copy of `owner` computes with the copy. Where somebody has
    wrapped the method since, their wrapper stays when the change is taken back, and ours hands every call on. A copy that
    was made meanwhile goes with the change.
    """
    before = getattr(owner, name)
    inner = before.__func__ if getattr(before, "__self__", None) is owner else None
    was_its_attribute, attribute = name in vars(owner), vars(owner).get(name)
    change, holder = Change(), reference(owner)

    @functools.wraps(inner or before)
    def replacement(self: Any, *args: Any, **kwargs: Any) -> Any:
        original = before if inner is None else types.MethodType(inner, self)
        return ours(self, original, *args, **kwargs) if change.active else original(*args, **kwargs)

    if inner is None:  # as a method, it has one parameter more
        taken = inspect.signature(before)
        first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        vars(replacement)["__signature__"] = taken.replace(parameters=[first, *taken.parameters.values()])
    setattr(replacement, _CHANGES, {**getattr(before, _CHANGES, {}), fix: change})
    setattr(owner, name, types.MethodType(replacement, owner))

    def back() -> None:
        found = holder()
        if getattr(vars(found).get(name), "__func__", None) is not replacement:
            return
        if was_its_attribute:
            setattr(found, name, attribute)
        else:
            delattr(found, name)

    change.back.append(back)
    return change


def overridden(owner: Any, name: str, fix: str) -> Change | None:
    """The change that this fix has made to `owner.name`, under later wrappers too; None where there is none in force."""
    for function in chain(getattr(owner, name, None)):
        change = getattr(function, _CHANGES, {}).get(fix)
        if change is not None and change.active:
            return change
    return None


def already(holder: Any, fix: str, owner: Any, *names: str) -> Patch | None:
    """These methods of `owner` held by `holder` where this fix has overridden them; None where it has not."""
    there = [change for name in names if (change := overridden(owner, name, fix)) is not None]
    undo = [step for change in there for step in change.hold(holder)]
    return Patch(fix, reason=ALREADY, _undo=undo) if there else None


def replaced(holder: Any, fix: str, owner: Any, called: str, **changes: Callable[..., Any]) -> Patch:
    """These methods of `owner`, `called` so, overridden, or held by `holder` where they are already."""
    if (done := already(holder, fix, owner, *changes)) is not None:
        return done
    made = [override(owner, name, fix, change) for name, change in changes.items()]
    undo = [step for change in made for step in change.hold(holder)]
    return Patch(fix, changed=tuple(f"{called}.{name}" for name in changes), _undo=undo)


def chain(function: Any) -> Iterator[Any]:
    """A function and everything that it wraps: accelerate puts autocast around a forward."""
    while function is not None:
        function = getattr(function, "__func__", function)  # of a method
        yield function
        function = getattr(function, "__wrapped__", None)


def closed_over(function: Any, name: str) -> Any:
    """What a function closes over under this name; None where it does not."""
    code = getattr(function, "__code__", None)
    cells = dict(zip(getattr(code, "co_freevars", ()), getattr(function, "__closure__", None) or (), strict=False))
    return cells[name].cell_contents if name in cells else None


def rebind(old: object, new: object, called: str | None = None) -> list[str]:
    """Gives every module-level name that holds `old`, or those `called` so, the value `new`; returns the names."""
    found = []
    for module_name, module in list(sys.modules.items()):
        namespace = getattr(module, "__dict__", None)  # never getattr by name: it would trigger lazy imports
        if not isinstance(namespace, dict):
            continue
        if id(old) not in map(id, list(namespace.values())):
            continue
        for name, value in list(namespace.items()):
            if value is old and called in (None, name):
                namespace[name] = new
                found.append(f"{module_name}.{name}")
    return found
