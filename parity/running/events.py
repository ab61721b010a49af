"""What a worker tells its supervisor: one strict JSON object a line, told apart by the key "event"."""

from __future__ import annotations

import json
from typing import Any, TypeAlias

import msgspec

from parity.decoding import decode
from parity.results.row import Row


class _Event(msgspec.Struct, frozen=True, tag_field="event", tag=str.lower):
    pass


class At(_Event, frozen=True):
    """A shard came to its case of this number: where a new process goes on if this one dies."""

    number: int


class Started(_Event, frozen=True):
    """An implementation is about to run on a case, `data` as JSON: whom to blame if the process does not come back."""

    case: str
    implementation: str
    data: dict[str, Any]


class Shrinking(_Event, frozen=True):
    """A finding is being minimised, now on this case."""

    case: str


class Judged(_Event, frozen=True):
    """A row."""

    row: Row


class Checked(_Event, frozen=True):
    """A ledger entry's own case was run; `stale`: it agrees now, None: it could not be evaluated here."""

    entry: str
    stale: bool | None


class ShardDone(_Event, frozen=True):
    """The first of the shards is done."""


class Done(_Event, frozen=True):
    """All shards are done."""


class Lost(_Event, frozen=True):
    """A worker was given up; told by the supervisor, not by a worker."""

    message: str


Event: TypeAlias = At | Started | Shrinking | Judged | Checked | ShardDone | Done | Lost


def line_of(event: Event) -> str:
    """The event as a line. Raises ValueError for a NaN or an infinity in it."""
    return json.dumps(msgspec.to_builtins(event), allow_nan=False) + "\n"


def read(line: str, source: str) -> Event:
    """The event of a line.

    Raises:
        UsageError: naming `source` and what is wrong with the line.
    """
    found: Event = decode(Event, line, source)
    return found
