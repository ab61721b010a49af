"""What a worker tells its supervisor, told apart by the key "event"."""

from typing import Any, TypeAlias

import msgspec

from parity.results.row import Row


class _Event(msgspec.Struct, frozen=True, tag_field="event", tag=str.lower):
    pass


class Importing(_Event, frozen=True):
    """A user's file is imported, or no more."""

    path: str | None


class At(_Event, frozen=True):
    """A shard came to its case of this number: where a new process goes on if this one dies."""

    number: int


class Started(_Event, frozen=True):
    """An implementation is about to run on a case, `data` as JSON: whom to blame if the process does not come back."""

    case: str
    implementation: str
    data: dict[str, Any]


class Judged(_Event, frozen=True):
    """A row; `lost`: of an implementation that took the process down, as how many losses that counts (`ShardQueue.hold`)."""

    row: Row
    lost: int = 0


class Checked(_Event, frozen=True):
    """A ledger entry's own case was run; `stale`: it agrees now, or nothing that fails in it is inside the entry's scope;
    None: it could not be evaluated here."""

    entry: str
    stale: bool | None


class Confirmed(_Event, frozen=True):
    """A fresh process has looked at a finding again: the (quantity, class) that it shows there."""

    shown: list[tuple[str, str | None]]


class ShardDone(_Event, frozen=True):
    """The shard came to its end, or after `cases` of its cases to that of the run's time; it took `seconds` of CPU time, and its
    process held `memory` MiB at most, on CUDA of the device's."""

    cases: int = 0
    seconds: float = 0.0
    memory: int = 0


class Retired(_Event, frozen=True):
    """After this pair the process judges nobody any more (`parity.protocol.process_state`): a fresh one goes on."""

    case: str
    implementation: str


class Lost(_Event, frozen=True):
    """A worker was given up, and the rest of its shard; `refused`: by itself, for its node is not that of the run."""

    message: str
    refused: bool = False


Event: TypeAlias = Importing | At | Started | Judged | Checked | Confirmed | ShardDone | Retired | Lost
