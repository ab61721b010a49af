"""Which implementations a run is about, known to the process that watches it without any user's code loaded there."""

from __future__ import annotations

import dataclasses
import functools
import json

from parity.errors import UsageError
from parity.process import tell, under_watch
from parity.registry import from_file, select
from parity.running.child import Ended, call

IMPORT_SECONDS = 300.0
"""On the clock: longer than that no file takes to import (vLLM takes half a minute)."""
STDERR = 2
"""What a file prints while it is imported does not mix with what this command prints."""


@dataclasses.dataclass(frozen=True)
class Chosen:
    """What the process that runs nothing itself needs to know of an implementation; `own`: it is from a user's file."""

    id: str
    family: str
    role: str
    own: bool = False


@functools.cache
def described(ids: tuple[str, ...]) -> tuple[Chosen, ...]:
    """What `registry.select` chooses; a user's files are imported in a child, never here.

    Raises:
        UsageError: as `select` does, and where a file ends the process that imports it.
    """
    if not any(".py:" in name for name in ids):
        return tuple(Chosen(i.id, i.family, i.role) for i in select(ids))
    try:
        answer = call("parity.running.chosen:describe", [json.dumps(ids)], IMPORT_SECONDS, stdout=STDERR)
    except Ended as error:
        raise UsageError(f"implementation {error.importing or ', '.join(ids)}: {error}") from None
    if "usage" in answer:
        raise UsageError(answer["usage"])
    return tuple(Chosen(**one) for one in answer["chosen"])


def describe(ids: str) -> int:
    """The other side of `described`."""
    under_watch()
    names = json.loads(ids)
    try:
        chosen = select(names)
        own = {i.id for name in names if ".py:" in name for i in from_file(name)}
    except UsageError as error:
        tell(answer={"usage": str(error)})
        return 0
    tell(answer={"chosen": [dataclasses.asdict(Chosen(i.id, i.family, i.role, i.id in own)) for i in chosen]})
    return 0
