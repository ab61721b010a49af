"""Which implementations a run has, without loading a user's code in the main process."""

import dataclasses
import functools
import json
from typing import Any

from parity.case.family import Family
from parity.case.inputs import Setting
from parity.decoding import convert
from parity.errors import UsageError
from parity.process import tell, under_watch
from parity.registry import NAMES, add_family, from_file, loss_families, loss_family, resolved, select
from parity.running.child import Ended, call

IMPORT_SECONDS = 300.0  # of CPU time: longer than that no file takes to import (vLLM takes half a minute)
STDERR = 2  # what a file prints while it is imported does not mix with what this command prints


@dataclasses.dataclass(frozen=True)
class Chosen:
    """What the process that runs nothing itself needs to know of an implementation; `from_user`: it is from a user's file."""

    id: str
    family: str
    role: str
    from_user: bool = False


@functools.cache
def described(ids: tuple[str, ...], families: tuple[str, ...] = ()) -> tuple[Chosen, ...]:
    """What `registry.select` chooses; a user's files are imported in a child, never here. What this process needs to
    know of the families in them is made known to the registry: their data, without their code. Raises UsageError as
    `select` does, and where a file ends the process that imports it."""
    if not any(".py:" in name for name in (*ids, *families)):
        return tuple(Chosen(i.id, i.family, i.role) for i in select(ids))
    try:
        answer = call("parity.running.chosen:describe", [json.dumps([ids, families])], IMPORT_SECONDS, stdout=STDERR)
    except Ended as error:
        raise UsageError(f"implementation {error.importing or ', '.join((*ids, *families))}: {error}") from None
    if "usage" in answer:
        raise UsageError(answer["usage"])
    for name, settings in answer["families"].items():
        if name not in loss_families():
            add_family(Family(name, convert(dict[str, Setting], settings, name), _no_code, _no_code, outputs={}))
    _NAMES.update(answer["names"])
    return tuple(Chosen(**one) for one in answer["chosen"])


_NAMES: dict[str, str] = {}  # FILE.py:NAME of a family -> its name, of those that were described


def named(families: tuple[str, ...]) -> tuple[str, ...]:
    """The names of families that were given to `described`."""
    return tuple(_NAMES.get(name, name) for name in families)


def describe(text: str) -> int:
    """The other side of `described`."""
    under_watch()
    ids, families = json.loads(text)
    try:
        names = {name: resolved(name) for name in families if ".py:" in name}
        chosen = select(ids)
        from_user = {i.id for name in ids if ".py:" in name for i in from_file(name)}
    except UsageError as error:
        tell(answer={"usage": str(error)})
        return 0
    found = [dataclasses.asdict(Chosen(i.id, i.family, i.role, i.id in from_user)) for i in chosen]
    # Of a family its settings, which are data, are asked for outside the processes that judge it.
    own = [loss_family(name) for name in loss_families() if name not in NAMES]
    kept = ("default", "doc", "choices", "size")
    told = {of.name: {n: {k: getattr(s, k) for k in kept} for n, s in of.settings.items()} for of in own}
    tell(answer={"chosen": found, "families": told, "names": names})
    return 0


def _no_code(*args: Any) -> Any:
    raise TypeError("a user's family: its code runs in workers alone")
