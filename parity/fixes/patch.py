"""The result of a runtime patch: what it changed, or why it changed nothing, and how to undo it."""

import contextlib
import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

logger = logging.getLogger("parity.fixes")

_logged: set[str] = set()
ORIGINAL = "_parity_original"  # what a replacement of a module's or a class's function keeps what it replaced under
ALREADY = "already applied"


class Change:
    """One change of the world. Each trainer or model that asks for it holds it; when the last lets go, it is taken back."""

    def __init__(self, *back: Callable[[], object]) -> None:
        self.back = list(back)  # what takes it back, last first
        self.holders: list[Callable[[], Any]] = []
        self.active = True

    def hold(self, owner: Any = None) -> list[Callable[[], object]]:
        """One holder more; what lets go, for a patch to undo. Nothing where `owner` holds it; None is always somebody else,
        an `object()`."""
        if owner is not None and any(holder() is owner for holder in self.holders):
            return []
        holder = reference(object() if owner is None else owner)
        self.holders.append(holder)

        def let_go() -> None:
            self.holders = [other for other in self.holders if other is not holder and other() is not None]
            if not self.holders:
                self.active = False
                while self.back:
                    self.back.pop()()

        return [let_go]


def reference(owner: Any) -> Callable[[], Any]:
    """Gives the owner back without keeping it alive, where its class allows that."""
    try:
        return weakref.ref(owner)
    except TypeError:
        return lambda: owner


@dataclass
class Patch(contextlib.AbstractContextManager["Patch"]):
    """What a patch did. Truth value: whether it changed anything; usable as a context manager that undoes it.

    What two trainers share, a model or a function of TRL, stays patched until the patches of both are undone. A second
    call for the same trainer finds it done ("already applied"), and its undo does nothing.
    """

    name: str
    changed: tuple[str, ...] = ()
    reason: str | None = None
    _undo: list[Callable[[], object]] = field(default_factory=list, repr=False)

    def __post_init__(self) -> None:
        line = str(self)
        if line not in _logged:
            _logged.add(line)
            logger.info(line)

    def __str__(self) -> str:
        return f"{self.name}: {', '.join(self.changed) if self.changed else f'nothing to do: {self.reason}'}"

    def __bool__(self) -> bool:
        return bool(self.changed)

    def __len__(self) -> int:
        return len(self.changed)

    def undo(self) -> None:
        """Lets go of what this call changed or found changed, in reverse order; a second call does nothing."""
        while self._undo:
            self._undo.pop()()

    def __exit__(self, *_: object) -> None:
        self.undo()
