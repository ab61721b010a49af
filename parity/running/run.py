"""A whole run: plan the shards, watch the workers, write rows, decide the exit code."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import datetime
import fcntl
import os
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
from msgspec.structs import replace

from parity import data
from parity.case.case import Frozen
from parity.case.inputs import defaults
from parity.case.profiles import PROFILES, shards
from parity.errors import UsageError
from parity.judging.pooled_slope import pooled
from parity.registry import family, load, loss_families, loss_family, meant, select
from parity.results.header import End, Header, Last
from parity.results.ledger import Ledger
from parity.results.row import Row
from parity.running import gpu, supervisor
from parity.running.chosen import described, named
from parity.running.events import At, Checked, Judged, Lost, Started, Stopped
from parity.running.provenance import header, resolve_device
from parity.trainers import catalogue

FIXED_SEED = 20261120
MINIMUM_REQUIRED = 20
TIMEOUT, FIRST_TIMEOUT = 180.0, 300.0
DTYPES = ("fp32", "fp16", "bf16")

AGREE, NEW, USAGE, NOTHING, STALE, INTERRUPTED, TERMINATED = 0, 1, 2, 3, 4, 130, 143
"""Exit codes of the contract; where several hold the order of precedence is usage, stopped, nothing, new, stale."""


@dataclasses.dataclass(frozen=True)
class Options:
    """What the command line asked for."""

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


@dataclasses.dataclass
class Result:
    """What a run came to."""

    header: Header
    rows: list[Row]
    stale: list[str]
    lost: list[str]
    exit_code: int
    reasons: list[str]


def plans(options: Options, device: str, seed: int, ledger_path: Path) -> list[dict[str, Any]]:
    """One plan per worker: the shards of every family dealt out, frozen cases first."""
    profile = PROFILES[options.profile]
    wanted = named(options.families)
    have = {i.family for i in described(options.implementations, options.families)}
    known = loss_families()
    families = [f for f in wanted or known if f in known and f in have]
    checked = catalogue.chosen(wanted, have)
    frozen = [f for f in frozen_cases(ledger_path) if profile.frozen_trainers or f[1]["family"] in known]
    frozen = [f for f in frozen if not options.dtypes or f[1]["dtype"] in options.dtypes]
    parts = shards(device)
    count = options.workers or gpu.workers(parts)
    gpus = gpu.visible() if device == "cuda" else []
    plan: dict[str, Any] = {
        "device": device,
        "threads": 1,
        "profile": options.profile,
        "dtypes": list(options.dtypes or DTYPES),
        "implementations": list(options.implementations),
        "families": [name for name in options.families if ".py:" in name],
        "ledger": str(ledger_path),
        "findings": str(options.reports / "findings"),
        "frozen": frozen,
        "memory": memory(count) if device == "cpu" else None,
        "deadline": None if options.max_time is None else time.time() + options.max_time,
    }
    out = [
        plan
        | {"shards": [], "gpu": gpus[n % len(gpus)] if gpus else None, "wait": gpu.START_APART * n if gpus else 0.0}
        for n in range(count)
    ]
    for number, name in enumerate([*families, *checked]):
        out[number % count]["shards"].append({"family": name, "index": -1, "count": 0, "seed": seed})
    for number, name in enumerate(families):
        total = loss_family(name).drawn.get(options.profile, 0)
        for index in range(parts):
            part = total // parts + (index < total % parts)
            if part:
                shard = {"family": name, "index": index, "count": part, "seed": seed}
                out[(number + index) % count]["shards"].append(shard)
    for number, name in enumerate(checked):
        total = len(catalogue.cases(name, options.profile, seed))
        for index in range(min(parts, total)):
            part = len(range(index, total, parts))
            shard = {"family": name, "index": index, "count": part, "seed": seed, "parts": parts}
            out[(number + index) % count]["shards"].append(shard)
    return [p for p in out if p["shards"]]


MEMORY = 4 << 30
"""Bytes that a worker has in any case: torch, transformers and the largest case take a quarter of it."""


def memory(workers: int) -> int:
    """Bytes for each of so many workers: its share of what is free."""
    return max(MEMORY, psutil.virtual_memory().available // workers)


def frozen_cases(ledger_path: Path) -> list[tuple[str, Any, dict[str, Any]]]:
    """(name, case JSON, remarks) of the shipped frozen cases and of the cases that the ledger names."""
    paths = {p.name: p for p in data.frozen_cases()}
    for entry, _ in Ledger.load(ledger_path).frozen():
        paths.setdefault(Path(entry.case).name, ledger_path.parent / entry.case)
    out = []
    for name, path in sorted(paths.items()):
        found = Frozen.load(path)
        out.append((name, found.case.to_json(), {"implementations": found.implementations, "fast": found.fast}))
    return out


def check(options: Options) -> None:
    """Refuse what does not exist before anything runs.

    Raises:
        UsageError: naming the value and the choices.
    """
    if options.profile not in PROFILES:
        raise UsageError(f"profile {options.profile!r} is unknown, {meant(options.profile, PROFILES)}")
    for dtype in options.dtypes:
        if dtype not in DTYPES:
            raise UsageError(f"dtype {dtype!r} is unknown, choose from {', '.join(DTYPES)}")
    described(options.implementations, options.families)
    for name in named(options.families):
        family(name)
    for item in options.require:
        name, _, device = item.partition(":")
        select([name])
        if device not in ("", "cpu", "cuda"):
            raise UsageError(f"--require {item!r}: device must be cpu or cuda")
    resolve_device(options.device)


def execute(options: Options, progress: Callable[[list[Row], int, int, str], None]) -> Result:
    """Run, writing rows as they come; `progress(rows, cases, of, now)` is called at every event."""
    from parity.results.report.rows import writer

    check(options)
    device = resolve_device(options.device)
    profile = PROFILES[options.profile]
    seed = options.seed if options.seed is not None else FIXED_SEED if profile.derandomised else secrets.randbits(31)
    ledger_path = options.ledger or data.ledger_file()
    plan = plans(options, device, seed, ledger_path)
    run_id = secrets.token_hex(4)
    cannot = _cannot(options, device)
    head = header(run_id, "cpu" if cannot else device, options.profile, seed)
    head.header.ends = True  # with a record of its end: a file without one is of a run that was killed
    every = (*loss_families(), *catalogue.names())
    head.header.dimensions = {n: defaults(family(n).settings) for n in every}
    rows: list[Row] = []
    verdicts: dict[str, bool | None] = {}
    lost: list[str] = []
    stopped: list[Stopped] = []
    begun = time.monotonic()
    path = options.results or options.reports / "results.ndjson"
    roles = {i.id: i.role for i in (load() | catalogue.implementations()).values()}
    of, done, ended, now = size(plan), 0, 0, ""
    with locked(options.reports), writer(path) as write:
        write(head)

        def keep(row: Row) -> None:
            rows.append(replace(row, run=run_id, role=roles.get(row.implementation, row.role)))
            write(rows[-1])

        try:
            with stopping():
                for event in supervisor.run([] if cannot else plan, TIMEOUT, FIRST_TIMEOUT):
                    match event:
                        case Judged():
                            keep(event.row)
                        case Checked():
                            verdicts[event.entry] = event.stale
                        case Lost():
                            lost.append(event.message)
                        case Stopped():
                            stopped.append(event)
                        case At():
                            done += 1
                        case Started():
                            now = f"{event.implementation} on {event.case}"
                    progress(rows, done, of, now)
        except KeyboardInterrupt as error:
            ended = TERMINATED if isinstance(error, Terminated) else INTERRUPTED
        for row in pooled(rows):
            keep(row)
        stale = sorted(i for i, s in verdicts.items() if s)
        code, reasons = (NOTHING, [cannot]) if cannot else judge_run(options, rows, stale, lost, device)
        if stopped:
            head.header.stopped = stopped_after(stopped)
            reasons = [*reasons, f"the time was over: {head.header.stopped}"]
        if ended:
            code, reasons = ended, [f"stopped after {done} of {of} cases", *reasons]
        complete = not (ended or stopped or lost)
        head.end = End(cases=done, of=of, complete=complete, exit_code=code)
        write(Last(end=head.end, run=run_id))
    head.header.seconds = round(time.monotonic() - begun, 1)
    return Result(head, rows, stale, lost, code, reasons)


def stopped_after(stopped: Sequence[Stopped]) -> str:
    """`policy after 120 of 6,000 cases, …`, the shards of a family together."""
    done, of = collections.Counter[str](), collections.Counter[str]()
    for one in stopped:
        done[one.family] += one.done
        of[one.family] += one.of
    return ", ".join(f"{name} after {done[name]:,} of {of[name]:,} cases" for name in of)


def size(plan: Iterable[dict[str, Any]]) -> int:
    """How many cases a plan is about: those drawn or listed, and the frozen ones of its families."""
    total = 0
    for worker in plan:
        for shard in worker["shards"]:
            frozen = sum(case["family"] == shard["family"] for _, case, _ in worker["frozen"])
            total += shard["count"] or frozen
    return total


class Terminated(KeyboardInterrupt):
    """The process was asked to end (SIGTERM): as Ctrl-C, with an exit code of its own."""


@contextlib.contextmanager
def stopping() -> Iterator[None]:
    """SIGTERM ends the run as Ctrl-C does: workers killed, folders removed, what there is reported."""

    def asked(number: int, frame: Any) -> None:
        raise Terminated

    if threading.current_thread() is not threading.main_thread():  # Python sets handlers in the main thread alone
        yield
        return
    before = signal.signal(signal.SIGTERM, asked)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """A folder of reports for one run at a time: two would write their rows under one header.

    Raises:
        UsageError: naming the process of the other.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open(folder / ".lock", "a+")  # noqa: SIM115 held open as long as the lock is
    except OSError as error:
        raise UsageError(f"{folder}: cannot be written: {error.strerror}") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            raise UsageError(
                f"{folder}: process {file.read().strip() or 'another'} writes its reports there; choose another --reports"
            ) from None
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield
        file.truncate(0)


def _cannot(options: Options, device: str) -> str | None:
    """Why a box with a GPU cannot give the run that was asked for: no run on its CPU instead, which would end green."""
    if device == "cpu":
        return gpu.unusable() if options.device == "auto" else None
    return gpu.no_triton() if any(i.interpreted for i in select(options.implementations)) else None


def required_kernels(options: Options) -> list[str]:
    """On CUDA every Triton kernel that runs by default is required: there it is what users run."""
    if options.dtypes or options.families:  # some kernels claim no other dtype; others are of another family
        return []
    return [i.id for i in select(options.implementations) if i.interpreted and not i.opt_in and not i.missing()]


def judge_run(
    options: Options, rows: Sequence[Row], stale: Sequence[str], lost: Sequence[str], device: str
) -> tuple[int, list[str]]:
    """The exit code and, a line each, why it is not 0."""
    nothing = [f"a worker was lost: {message}" for message in lost]
    comparisons = cases_compared(rows)
    if not sum(comparisons.values()):
        nothing.append("nothing was compared")
    kernels = required_kernels(options) if device == "cuda" else []
    nothing += [f"required on CUDA: {name}: {_why(name, rows)}" for name in kernels if not comparisons[name]]
    for item in options.require:
        name, _, wanted = item.partition(":")
        there = cases_compared(r for r in rows if r.device == wanted) if wanted else comparisons
        count = sum(n for i, n in there.items() if i == name or i.startswith(f"{name}."))
        if count < MINIMUM_REQUIRED:
            nothing.append(f"required {item}: {count} judged comparisons, at least {MINIMUM_REQUIRED} expected")
    new = collections.Counter(r.implementation for r in rows if r.new)
    found = [f"{count} new failing rows of {name}" for name, count in new.most_common()]
    own = {i.id for i in described(options.implementations, options.families) if i.own}
    nothing += [
        f"{id}: nothing was compared, {_why(id, rows)}" for id in sorted(own) if not comparisons[id] and not new[id]
    ]
    ledger = Ledger.load(options.ledger or data.ledger_file())
    rotten = [f"ledger entry {name} no longer reproduces, its case agrees: {ledger.place(name)}" for name in stale]
    rotten += ledger.expired(datetime.datetime.now(datetime.UTC).date())
    code = NOTHING if nothing else NEW if found else STALE if rotten else AGREE
    return code, nothing + found + rotten


def _why(id: str, rows: Iterable[Row]) -> str:
    """The commonest reason for which the cases of an implementation could not be judged, a refusal before all others."""
    given = [(r.verdict == "refused", f"{r.verdict}: {r.message}") for r in rows if r.implementation == id]
    counted = collections.Counter(given)
    return max(counted, key=lambda key: (key[0], counted[key]))[1] if counted else "no case was drawn for it"


def cases_compared(rows: Iterable[Row]) -> collections.Counter[str]:
    """Implementation -> cases through it in which something was judged."""
    seen = {(r.implementation, r.case) for r in rows if r.judged}
    return collections.Counter(name for name, _ in seen)
