"""CPU seconds of this process by stage of a comparison, by phase and by implementation: where the time of a run goes."""

import collections
import contextlib
import time
from typing import Any, Literal

Kind = Literal["stage", "phase", "implementation"]
OTHER = "other"

_at: dict[Kind, str] = {"stage": OTHER, "phase": OTHER, "implementation": OTHER}
_before: list[tuple[Kind, str]] = []
_spent: dict[tuple[str, str, str], float] = collections.defaultdict(float)
_since = [time.process_time()]
"""In a list: a name that is bound anew in every call would look like a patch to `parity.protocol.bindings`."""


class within(contextlib.ContextDecorator):
    """Around a block or a function: CPU time in it counts for `name`, what an inner one of its kind takes left out."""

    def __init__(self, kind: Kind, name: str):
        self.kind, self.name = kind, name

    def __enter__(self) -> None:
        _charge()
        _before.append((self.kind, _at[self.kind]))
        _at[self.kind] = self.name

    def __exit__(self, *exception: Any) -> None:
        _charge()
        kind, name = _before.pop()
        _at[kind] = name


def spent() -> dict[str, dict[str, float]]:
    """{"phase": {name: seconds}, "stage": …, "implementation": …} since the last time it was asked."""
    _charge()
    kinds: tuple[Kind, ...] = ("stage", "phase", "implementation")
    out: dict[str, dict[str, float]] = {kind: collections.defaultdict(float) for kind in kinds}
    for names, seconds in _spent.items():
        for kind, name in zip(kinds, names, strict=True):
            out[kind][name] += seconds
    _spent.clear()
    return {kind: {name: round(s, 4) for name, s in by.items()} for kind, by in out.items()}


def _charge() -> None:
    now = time.process_time()
    _spent[_at["stage"], _at["phase"], _at["implementation"]] += now - _since[0]
    _since[0] = now
