"""What a run does, cut into shards: what a shard's rows are depends on the shard and the seed, not on who runs it when. And what
its workers tell of it."""

import collections
import contextlib
import dataclasses
import hashlib
import math
import os
import shlex
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec
import psutil
from msgspec import field
from msgspec.structs import fields

from parity import data
from parity.case.case import Frozen
from parity.case.profiles import PROFILES, SHARD, cases_drawn, dealt, streams
from parity.errors import UsageError
from parity.implementations.implementation import Implementation
from parity.implementations.user import loaded
from parity.process import tell, under_watch
from parity.protocol import process_state
from parity.registry import from_file, loss_families, meant, resolved, select
from parity.results.ledger import Ledger
from parity.results.row import Asked, Row
from parity.running import gpu
from parity.running.child import Ended, call
from parity.running.provenance import resolve_device
from parity.trainers import catalogue

ASKED = [one.name for one in fields(Asked) if one.name != "files"]
DTYPES = ("fp32", "fp16", "bf16")
STDERR = 2  # what a file prints while it is imported does not mix with what this command prints
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
MEMORY = 4 << 30  # bytes that a worker has in any case: torch, transformers and the largest case take a quarter of it


@dataclasses.dataclass(frozen=True)
class Options:
    """What the command line asked for. `confirm`: a new finding counts once a fresh process shows it, in any profile; `ray`: the
    address of a Ray cluster whose nodes run the shards; `only`: files of frozen cases that alone are run, whatever they gave when
    they were measured; `minimise`: look for smaller cases of new findings."""

    profile: str = "pr"
    families: tuple[str, ...] = ()
    implementations: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    device: str = "auto"
    seed: int | None = None
    require: tuple[str, ...] = ()
    ledger: Path | None = None
    results: Path | None = None
    reports: Path = Path("reports")
    workers: int | None = None
    max_time: float | None = None
    resume: Path | None = None
    confirm: bool = False
    ray: str | None = None
    only: tuple[str, ...] = ()
    minimise: bool = True

    @property
    def file(self) -> Path:
        return self.results or self.reports / "results.ndjson"

    @property
    def place(self) -> str:
        """What `parity replay` needs to find a case of this run, where that is not the default."""
        return "" if self.file == Path("reports/results.ndjson") else f" --reports {shlex.quote(str(self.file))}"

    @property
    def own(self) -> str:
        """What it needs to know the families of a user's files."""
        return "".join(f" --family {shlex.quote(name)}" for name in self.families if ".py:" in name)

    @property
    def findings(self) -> Path:
        """Folder of the minimised cases."""
        return self.reports / "findings"

    def asked(self) -> Asked:
        """What decides about the rows, besides profile and seed, as the header keeps it."""
        own = [name for name in (*self.implementations, *self.families) if ".py:" in name]
        files = [name.partition(".py:")[0] + ".py" for name in own]
        files.append(str(self.ledger or data.ledger_file()))
        try:
            digests = {name: hashlib.sha256(Path(name).read_bytes()).hexdigest()[:16] for name in files}
        except OSError as error:
            raise UsageError(f"{error.filename}: cannot be read: {error.strerror}") from None
        kept = {name: getattr(self, name) for name in ASKED}
        return Asked(**kept | {"ledger": None if self.ledger is None else str(self.ledger), "files": digests})

    @classmethod
    def of(cls, asked: Asked, **more: Any) -> "Options":
        """The options of a run whose header keeps what was asked for."""
        kept = {name: getattr(asked, name) for name in ASKED}
        return cls(**kept | {"ledger": None if asked.ledger is None else Path(asked.ledger)} | more)


class Sought(msgspec.Struct, frozen=True, kw_only=True):
    """A new finding that is looked at again: who fails, in which (quantity, class), the first of which is minimised, and up
    to three cases as drawn. `fresh`: in a process that has judged nothing else, and what no case
    shows there does not count. `seconds`: for minimising the first of them; 0: not at all."""

    implementation: str
    subjects: list[tuple[str, str | None]]
    gate: str | None
    cases: list[dict[str, Any]]
    fresh: bool = False
    seconds: float = 0.0

    @property
    def signature(self) -> "Signature":
        """Of the one that is minimised."""
        return self.implementation, *self.subjects[0]


class Shard(msgspec.Struct, frozen=True, kw_only=True):
    """`count` cases of a family, from number `start` on: frozen ones, those of a trainer's checks, or of the `of` that
    are drawn in stream `index`; what `implementations` get besides their draws, which counts as one case; or a
    finding. `own`: the checks are those of a user's class too, what comes besides is a user's function's. `resume` cases
    at the start were done before a worker died; `skip` names pairs (case, implementation) that killed it, `exclude`
    implementations left out."""

    family: str
    kind: Literal["frozen", "checks", "drawn", "besides", "finding"]
    seed: int
    count: int
    start: int = 0
    index: int = 0
    of: int = 0
    implementations: tuple[str, ...] = ()
    own: bool = False
    sought: Sought | None = None
    resume: int = 0
    skip: tuple[tuple[str, str], ...] = ()
    exclude: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The same in every run with this seed and profile."""
        if self.sought is not None:
            return " ".join([self.family, "finding", *map(str, self.sought.signature)])
        what = ",".join(self.implementations) or f"{self.index}.{self.start}"
        return f"{self.family} {self.kind} {what}"


class Plan(msgspec.Struct, kw_only=True):
    """What every worker is told, and with what it has of its own each of the `workers`; the shards that they are dealt."""

    settings: dict[str, Any]
    shards: list[Shard]
    workers: list[dict[str, Any]] = field(default_factory=list)
    announcement: str = ""


Signature: TypeAlias = tuple[str, str, str | None]
"""Implementation, subject and class: what makes two failing rows the same finding."""


def signature_of(row: Row) -> Signature:
    return row.implementation, row.subject, row.cls


def demanded(item: str) -> tuple[str, str]:
    """ID[:cpu|cuda] or FILE.py:NAME[:cpu|cuda] as (id, device or nothing). Raises UsageError for another device."""
    name, sign, device = item.rpartition(":")
    if device in ("cpu", "cuda"):
        return name, device
    if sign and not name.endswith(".py"):
        raise UsageError(f"--require {item!r}: device must be cpu or cuda")
    return item, ""


def imported(*names: str) -> int:
    """Load what FILE.py:NAME names; what is wrong with it otherwise, its import here says."""
    under_watch()
    with contextlib.suppress(UsageError):
        for name in names:
            loaded(name, process_state.importing)
    tell(answer=True)
    return 0


def check(options: Options) -> None:
    """Refuse what does not exist before anything runs. Raises UsageError naming the value and the choices."""
    if options.profile not in PROFILES:
        raise UsageError(f"profile {options.profile!r} is unknown, {meant(options.profile, PROFILES)}")
    for dtype in options.dtypes:
        if dtype not in DTYPES:
            raise UsageError(f"dtype {dtype!r} is unknown, choose from {', '.join(DTYPES)}")
    for name in dict.fromkeys(n for n in (*options.families, *options.implementations) if ".py:" in n):
        try:
            call("parity.running.plan:imported", [name], stdout=STDERR)
        except Ended as how:
            path = name.rpartition(":")[0]
            raise UsageError(f"implementation {name!r}: importing {path} ended the process ({how})") from None
    wanted = [resolved(name) for name in options.families]
    of_user = collections.defaultdict[str, list[str]](list)
    for one in from_user(options) if wanted else ():
        of_user[one.id].append(one.family)
    for name, its in of_user.items():  # a trainer is of two
        if not {*its} & {*wanted}:
            raise UsageError(
                f"{name} is of family {' and '.join(its)}, and --family names {', '.join(options.families)}"
            )
    for item in (*options.implementations, *(demanded(item)[0] for item in options.require)):
        select([item])
    resolve_device(options.device)


def from_user(options: Options) -> list[Implementation]:
    """The implementations that are of a user's files."""
    return [i for name in options.implementations if ".py:" in name for i in from_file(name)]


def planned(options: Options, device: str, seed: int) -> Plan:
    """The shards of a run, in an order that depends on its options alone, and what its workers are told."""
    ledger_path = options.ledger or data.ledger_file()
    profile = PROFILES[options.profile]
    wanted = tuple(map(resolved, options.families))
    chosen, own = select(options.implementations), {i.family for i in from_user(options)}
    have = {i.family for i in chosen}
    known = loss_families()
    families = [f for f in wanted or known if f in known and f in have]
    checked = catalogue.chosen(wanted, have)
    frozen = {
        name: case
        for name, path in sorted(frozen_files(Ledger.known(ledger_path)).items() if profile.frozen else ())
        if (not options.only or name in options.only)
        and ((case := Frozen.load(path).case).family in known or profile.frozen_whole)
        and (not options.dtypes or case.dtype in options.dtypes)
    }
    shards: list[Shard] = []

    def cut(name: str, kind: Any, slices: Iterable[tuple[int, int]], **more: Any) -> None:
        shards.extend(Shard(family=name, kind=kind, seed=seed, start=s, count=n, **more) for s, n in slices)

    for name in (*families, *checked):
        cut(name, "frozen", slices(sum(case.family == name for case in frozen.values()), FROZEN))
    for name in families if not options.only else ():
        counts = streams(cases_drawn(name, options.profile), device)
        for index, (of, end) in enumerate(zip(counts, dealt(options.profile, counts, name in own), strict=True)):
            first, others = slices(min(FIRST, end), FIRST), slices(max(0, end - FIRST), SHARD, FIRST)
            cut(name, "drawn", [*first, *others], index=index, of=of)
    together: dict[tuple[str, str], list[str]] = {}  # of a library, which takes much the same: so a case is judged once
    for one in chosen if not options.only else ():
        if one.family in families:
            together.setdefault((one.family, one.library or one.id), []).append(one.id)
    for (name, _), ids in together.items():
        of_user = any(".py:" in one for one in ids)
        shards.append(Shard(family=name, kind="besides", seed=seed, count=1, implementations=tuple(ids), own=of_user))
    asked = bool(options.families or options.implementations)
    for name in checked if not options.only else ():
        count = len(catalogue.cases(name, options.profile, seed, asked, name in own))
        cut(name, "checks", slices(count, CHECKS), own=name in own)
    count, why = workers(options.workers, len(shards))
    gpus = gpu.visible() if device == "cuda" else []
    reserve = min(profile.minimise_seconds, (options.max_time or 0.0) / 10)  # for findings, once no more is drawn
    settings: dict[str, Any] = {
        "device": device,
        "profile": options.profile,
        "dtypes": list(options.dtypes or DTYPES),
        "implementations": list(options.implementations),
        "families": [name for name in options.families if ".py:" in name],
        "ledger": str(ledger_path),
        "frozen": [*frozen],
        "measuring": bool(options.only),
        "memory": memory(count) if device == "cpu" else None,
        "deadline": None if options.max_time is None else time.time() + options.max_time - reserve,
    }
    each = [settings | ({"gpu": gpus[n % len(gpus)]} if gpus else {}) for n in range(count)]
    return Plan(settings=settings, shards=shards, workers=each, announcement=why)


FIRST = 8  # drawn cases in the first shard of a stream, which is run early (`shard_queue.by_yield`)
FROZEN, CHECKS = 3, 4
"""Frozen cases, and checks of trainers, in a shard: one takes as long as ten drawn ones, some as long as a hundred."""


def slices(total: int, size: int, begin: int = 0) -> Iterator[tuple[int, int]]:
    """(start, count) of `total` cases from number `begin` on, about `size` at a time."""
    parts = math.ceil(total / size)
    for part in range(parts):
        start, end = part * total // parts, (part + 1) * total // parts
        yield begin + start, end - start


def workers(wanted: int | None, shards: int) -> tuple[int, str]:
    """How many workers, and why: a core each, as far as the free memory has `MEMORY` for each, no more than shards."""
    cores, free = CORES, psutil.virtual_memory().available
    count = max(1, min(wanted or cores, shards, free // MEMORY if wanted is None else shards))
    why = "as asked" if wanted else f"{cores} cores, {free >> 30} GiB free"
    return count, f"{count} worker{'s' if count > 1 else ''} ({why})"


def memory(count: int) -> int:
    """Bytes for each of so many workers: its share of what is free."""
    return max(MEMORY, psutil.virtual_memory().available // count)


def frozen_files(ledger: Ledger) -> dict[str, Path]:
    """The files of the shipped frozen cases and of the cases that a ledger names, by name."""
    shipped = {path.name: path for path in data.frozen_cases()}
    entered = {Path(entry.case).name: ledger.folder / entry.case for entry in ledger.entries}
    return entered | shipped


class _Event(msgspec.Struct, frozen=True, tag_field="event", tag=str.lower):
    """What a worker tells its supervisor, told apart by the key "event"."""


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


class Confirmed(_Event, frozen=True):
    """A fresh process has looked at a finding again: the (quantity, class) that it shows there."""

    shown: list[tuple[str, str | None]]


class ShardDone(_Event, frozen=True):
    """The shard came to its end, or after `cases` of its cases to that of the run's time; it took `seconds` of CPU time."""

    cases: int = 0
    seconds: float = 0.0


class Retired(_Event, frozen=True):
    """After what was started last the process judges nobody any more (`parity.protocol.process_state`): a fresh one goes on."""


class Lost(_Event, frozen=True):
    """A worker was given up, and the rest of its shard; `refused`: by itself, for its node is not that of the run."""

    message: str
    refused: bool = False


Event: TypeAlias = At | Started | Judged | Confirmed | ShardDone | Retired | Lost
