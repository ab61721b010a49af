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


class Stopped(_Event, frozen=True):
    """The time of the run was over in a shard of this family, after `done` of its `of` cases."""

    family: str
    done: int
    of: int


class ShardDone(_Event, frozen=True):
    """The first of the shards is done."""


class Done(_Event, frozen=True):
    """All shards are done."""


class Retired(_Event, frozen=True):
    """After this pair the process judges nobody any more (`parity.world.broken`): a fresh one goes on."""

    case: str
    implementation: str


class Lost(_Event, frozen=True):
    """A worker was given up; told by the supervisor, not by a worker."""

    message: str


Event: TypeAlias = At | Started | Shrinking | Judged | Checked | Stopped | ShardDone | Done | Retired | Lost


def line_of(event: Event) -> str:
    """The event as a line. Raises ValueError for a NaN or an infinity in it."""
    return json.dumps(msgspec.to_builtins(event), allow_nan=False) + "\n"


def signed(nonce: str, pid: int, event: Event) -> str:
    """The line of an event of the process `pid` that was told the nonce."""
    return f"{nonce} {pid} {line_of(event)}"


def genuine(line: str, nonce: str, pid: int) -> str | None:
    """A signed line without its signature; None for what a fork, a library or an implementation wrote, or a line cut short."""
    head = f"{nonce} {pid} "
    return line[len(head) :] if line.startswith(head) and line.endswith("\n") else None


def read(line: str, source: str) -> Event:
    """The event of a line.

    Raises:
        UsageError: naming `source` and what is wrong with the line.
    """
    found: Event = decode(Event, line, source)
    return found
