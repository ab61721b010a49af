"""One thing of a process that all parties share, which a call must leave alone."""

import dataclasses
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True)
class Watch:
    """One thing that a call must leave alone: `get` reads it, `put` restores what `get` gave.

    `named` tells from both readings what changed, where the name alone says too little. Without `put` nothing can undo
    it: see `Snapshot.restore`. `kept`: what a user's file sets at import stays in force for its own calls.
    """

    name: str
    get: Callable[[], Any]
    put: Callable[[Any], Any] | None = None
    named: Callable[[Any, Any], list[str]] | None = None
    kept: bool = True

    def differences(self, before: Any, now: Any) -> list[str]:
        """How the change is named."""
        return self.named(before, now) if self.named else [f"{self.name} changed"]
