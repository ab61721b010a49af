"""What a runtime patch returns: what it changed, or why it changed nothing, and how to take it back."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self

logger = logging.getLogger("parity.fixes")

_logged: set[str] = set()
ORIGINAL = "_parity_original"  # what a replacement keeps what it replaced under


@dataclass
class Patch:
    """What a patch did. Truth value: whether it changed anything; usable as a context manager that undoes it."""

    name: str
    changed: tuple[str, ...] = ()
    reason: str | None = None
    model: Any = None  # what to train from now on, where the patch is about a model
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
        """Takes back what this call changed, in reverse order; a second call does nothing."""
        while self._undo:
            self._undo.pop()()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()
