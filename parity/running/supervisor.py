"""Starts the worker processes, passes their rows on, and gives a verdict when one hangs or dies."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import os
import queue
import re
import secrets
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import psutil
from msgspec.structs import replace

from parity.errors import UsageError
from parity.process import interpreter
from parity.protocol import faults
from parity.results.row import IN_ITS, NO_REFERENCE, STOPPED, UNKNOWN, Row, Verdict
from parity.running import cpu_limit, gpu
from parity.running.deck import Deck
from parity.running.events import At, Event, Judged, Lost, Retired, ShardDone, Started, genuine
from parity.running.events import read as read_event
from parity.running.plan import Shard

MAX_RESTARTS = 20
SLEEPING = 2.0
"""Clock ÷ limit for a process that uses next to no CPU time: it waits for something that does not come."""
ASLEEP = 0.05
"""Share of a core below which a process sleeps; one of six that compute on a core has three times as much."""
THRICE = 3
"""Losses of workers to one implementation after which it is left out."""


@dataclasses.dataclass
class Worker:
    """A worker process with the shard it has.

    `last`: when it said something last; `computed`: its CPU time and how long it had waited for a core when it had been
    silent since, None before that.
    `kept`: rows of the implementation that runs, passed on when it is done, so that none is there twice when it runs
    again in a fresh process; `done`: (case, implementation) pairs passed on since the case `at` began. `retried`: pairs
    that had a second chance, with what a lost CUDA context said; `retired`: the pair after which the process asked for a
    successor; `again`: its first case was begun before; `references`: case -> a reference
    that was judged on it. `streams`: what the process has drawn from.
    """

    plan: dict[str, Any]
    shard: Shard | None = None
    process: subprocess.Popen[str] | None = None
    nonce: str = ""
    started: Started | None = None
    at: int = 0
    last: float = 0.0
    computed: tuple[float, float] | None = None
    restarts: int = 0
    errors: Path | None = None
    finished: bool = False
    kept: list[Judged] = dataclasses.field(default_factory=list)
    done: set[tuple[str, str]] = dataclasses.field(default_factory=set)
    retried: dict[tuple[str, str] | None, str] = dataclasses.field(default_factory=dict)
    retired: Retired | None = None
    references: dict[str, str] = dataclasses.field(default_factory=dict)
    again: bool = False
    blocking: bool = False
    streams: list[tuple[str, int]] = dataclasses.field(default_factory=list)


Told: TypeAlias = tuple[Shard, Event]


def run(plans: Sequence[dict[str, Any]], deck: Deck, timeout: float, first_timeout: float) -> Iterator[Told]:
    """Deal the shards to a process for every plan and yield their events and, for one that is given up, `Lost`.

    An implementation that is silent for `timeout` seconds of CPU time (the first of a process: `first_timeout`, it
    imports), or on the clock for SLEEPING times as many asleep or `cpu_limit.BACKSTOP` times as many in any case, those in
    which it waited for a core left out, is killed: its row is timed-out. A process that ends before it is done is given
    one more chance, for it may have been ended from outside; the second time its row is crashed, and a CUDA context that
    was lost once only is crashed too.
    Then a new process goes on behind the case, without that implementation on it. A finding that ends its process is not
    looked at again.
    """
    with watching(plans, deck) as watch:
        yield from watch.follow(timeout, first_timeout)


@contextlib.contextmanager
def watching(plans: Sequence[dict[str, Any]], deck: Deck) -> Iterator[Watch]:
    """A watch with a worker for every plan; their processes are ended at the end."""
    remove_abandoned()
    with tempfile.TemporaryDirectory(prefix=f"parity-{os.getpid()}-", ignore_cleanup_errors=True) as folder:
        watch = Watch(deck, Path(folder))
        watch.workers = [Worker(plan, errors=Path(folder) / f"stderr-{n}") for n, plan in enumerate(plans)]
        try:
            yield watch
        finally:
            for worker in watch.workers:
                if worker.process is not None:
                    _end(worker.process)


def remove_abandoned() -> None:
    """Remove the temporary folders of runs that were killed."""
    for folder in Path(tempfile.gettempdir()).glob("parity-*-*"):
        found = re.fullmatch(r"parity-(\d+)-\w+", folder.name)
        with contextlib.suppress(OSError):
            if found and not psutil.pid_exists(int(found[1])) and folder.stat().st_uid == os.getuid():
                shutil.rmtree(folder, ignore_errors=True)


def _end(process: subprocess.Popen[str]) -> None:
    """Kill a worker and what it started."""
    assert process.stdin is not None
    with contextlib.suppress(OSError):
        process.stdin.close()
    if process.poll() is None:
        cpu_limit.end(process.pid)
        process.wait()


def _silent(worker: Worker, limit: float) -> tuple[str, bool]:
    """Why a worker has been silent for too long, or nothing, and whether it slept; on a loaded machine the clock says little."""
    if worker.shard is None or worker.process is None:
        return "", False
    if worker.computed is None:
        worker.computed = cpu_limit.cpu_time(worker.process.pid), cpu_limit.starved(worker.process.pid)
    waited = time.monotonic() - worker.last
    if waited <= limit:
        return "", False
    spent = cpu_limit.cpu_time(worker.process.pid) - worker.computed[0]
    waited -= max(0.0, cpu_limit.starved(worker.process.pid) - worker.computed[1])  # for a core
    asleep = waited > SLEEPING * limit and spent < ASLEEP * waited
    over = asleep or spent > limit or waited > cpu_limit.BACKSTOP * limit
    return (f"no answer for {waited:.0f} s, {spent:.0f} s of them CPU time" if over else ""), asleep


def _late(worker: Worker) -> bool:
    """Whether the time of the run is over: what hangs now is waited for once, on the frozen cases that are left too."""
    deadline = worker.plan.get("deadline")
    return deadline is not None and time.time() > deadline


class Watch:
    """Deals shards to workers and makes of what they say the events of a run."""

    def __init__(self, deck: Deck, folder: Path):
        self.deck, self.folder = deck, folder
        self.workers: list[Worker] = []
        self.events: queue.Queue[tuple[Worker, subprocess.Popen[str], Event | None]] = queue.Queue()
        self.excluded: list[str] = []
        self.losses: collections.Counter[str] = collections.Counter()

    def follow(self, timeout: float, first_timeout: float) -> Iterator[Told]:
        """The events of the workers until no shard is left; their processes wait for more."""
        while True:
            for worker in self.workers:
                self.deal(worker)
            if not any(w.shard for w in self.workers):
                return
            try:
                worker, process, event = self.events.get(timeout=0.5)
            except queue.Empty:
                for worker in self.workers:
                    message, asleep = _silent(worker, timeout if worker.started else first_timeout)
                    if message:
                        assert worker.process is not None and worker.errors is not None
                        message += gpu.where(worker.process, worker.errors)
                        yield from self.lost(worker, message, "timed-out", out=asleep)
                continue
            if process is not worker.process:  # what one that was given up had still to say
                continue
            worker.last, worker.computed = time.monotonic(), None
            if isinstance(event, Lost):
                yield from self.given_up(worker, event.message)
            elif event is not None:
                yield from self.passed_on(worker, event)
            elif worker.shard is not None:
                yield from self.lost(worker, _death(worker), "crashed")
            else:  # it ended between two shards: the next one has a new process
                _end(process)
                worker.process = None

    def deal(self, worker: Worker) -> None:
        """The next shard for a worker that has none."""
        if worker.shard is not None or worker.finished:
            return
        worker.shard = self.deck.take(worker.streams)
        if worker.shard is None:
            return
        worker.at, worker.again, worker.started = worker.shard.resume, False, None
        worker.done, worker.references = {*worker.shard.done}, dict(worker.shard.references)
        worker.retried.clear()
        fresh = worker.shard.sought is not None and worker.shard.sought.fresh
        if (fresh or worker.blocking) and worker.process is not None:
            _end(worker.process)
            worker.process = None
        self.start(worker)

    def start(self, worker: Worker, blocking: bool = False) -> None:
        """Tell a worker its shard; where it has no process, a new one; `blocking`: one that waits for each CUDA kernel."""
        assert worker.shard is not None
        if worker.process is None:
            _start(worker, self.events, self.folder, blocking)
            worker.streams, worker.blocking = [], blocking
        assert worker.process is not None and worker.process.stdin is not None
        shard = replace(worker.shard, exclude=(*worker.shard.exclude, *self.excluded))
        if shard.kind == "drawn":
            worker.streams.append((shard.family, shard.index))
        worker.last, worker.computed = time.monotonic(), None
        with contextlib.suppress(OSError):  # it has ended: an event says so
            worker.process.stdin.write(json.dumps(msgspec.to_builtins(shard)) + "\n")
            worker.process.stdin.flush()

    def passed_on(self, worker: Worker, event: Event) -> Iterator[Told]:
        """The event, after the rows that were held back; keeps what a new process would have to know."""
        shard = worker.shard
        if shard is None:
            return
        if isinstance(event, Judged):
            worker.kept.append(event)
            return
        for judged in worker.kept:
            worker.done.add((judged.row.case, judged.row.implementation))
            if judged.row.role == "reference" and judged.row.judged:
                worker.references.setdefault(judged.row.case, judged.row.implementation)
            yield shard, judged
        yield from self.not_again(worker, shard)
        worker.kept.clear()
        match event:
            case Started():
                worker.started = event
            case At():
                if event.number != worker.at:
                    worker.done.clear()
                    worker.references.clear()
                worker.at = event.number
                if worker.again:  # the process before this one has said so
                    worker.again = False
                    return
            case ShardDone():
                worker.shard = None
                self.deck.back(shard, event.seconds)
            case Retired():
                worker.retired = event
        yield shard, event

    def not_again(self, worker: Worker, shard: Shard) -> Iterator[Told]:
        """A row for what lost a CUDA context and came back the second time: a race, or a fault that waiting hides."""
        at = worker.started
        first = worker.retried.get((at.case, at.implementation)) if at else None
        if at is None or not first or any(one.row.verdict in STOPPED for one in worker.kept):
            return
        worker.retried[at.case, at.implementation] = ""
        message = f"{first}; not again{f' with {faults.BLOCKING}=1' if worker.blocking else ''}"
        yield shard, Judged(self.row(worker, at, "crashed", message, "call"), lost=True)
        self.hold(at.implementation)

    def row(self, worker: Worker, at: Started, verdict: Verdict, message: str, part: str) -> Row:
        """The row of what did not come back from this part of it."""
        return lost_row(at, verdict, message, worker.plan["device"], part, worker.references.get(at.case))

    def hold(self, implementation: str, out: bool = False) -> None:
        """One more loss of a worker to this implementation; after THRICE, or `out`, it is left out of all further cases."""
        self.losses[implementation] += 1
        if out or self.losses[implementation] >= THRICE:
            self.excluded.append(implementation)

    def given_up(self, worker: Worker, message: str) -> Iterator[Told]:
        """A worker that is not started again, and its shard."""
        shard, worker.shard, worker.finished = worker.shard, None, True
        if shard is not None:
            self.deck.back(shard)
            yield shard, Lost(message)

    def lost(self, worker: Worker, message: str, verdict: Verdict, out: bool = False) -> Iterator[Told]:
        """A new process; and where the pair had its second chance, a row for it and a process that leaves it out.

        `out`: the implementation is left out of all further cases at once.
        """
        worker.kept.clear()
        shard, started, retired = worker.shard, worker.started, worker.retired
        assert shard is not None and worker.process is not None
        _end(worker.process)
        worker.process, worker.retired = None, None
        part = faults.kept_place(place_of(worker))
        if shard.kind == "finding":
            worker.shard = None
            self.deck.back(shard)
            return
        last = retired or started
        pair = (last.case, last.implementation) if last else None
        skip = shard.skip
        once_more = verdict == "crashed" and not retired and pair not in worker.retried
        if once_more:
            worker.retried[pair] = message if faults.says(message) else ""
        else:
            worker.restarts += 1
            if pair is None or worker.restarts > MAX_RESTARTS:
                yield from self.given_up(worker, message)
                return
            if started is not None and not retired and pair not in worker.done:
                message += f"{IN_ITS}{part}" if part else ""
                yield shard, Judged(self.row(worker, started, verdict, message, part), lost=True)
            skip = (*skip, pair)
            self.hold(pair[1], out or (verdict == "timed-out" and _late(worker)))
        worker.again = last is not None
        worker.shard = replace(shard, resume=worker.at, done=tuple(sorted(worker.done)), skip=skip)
        self.start(worker, blocking=once_more)


def _start(worker: Worker, events: Any, folder: Path, blocking: bool = False) -> None:
    assert worker.errors is not None
    plan = folder / f"{worker.errors.name}.json"
    worker.nonce = secrets.token_hex(8)
    identity = {"nonce": worker.nonce, "parent": os.getpid()}
    place_of(worker).unlink(missing_ok=True)  # of the process before it
    plan.write_text(json.dumps(worker.plan | identity | {"place": str(place_of(worker))}))
    env = gpu.child(worker.plan["device"], worker.plan["threads"], worker.plan.get("gpu"))
    env = {**env, faults.BLOCKING: "1"} if blocking else env
    command = [*interpreter("parity.running.worker:main"), str(plan)]
    with worker.errors.open("w") as errors:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=env,
            text=True,
            start_new_session=True,  # Ctrl-C is for the watcher, who ends its workers
        )
    worker.process, worker.last, worker.started, worker.computed = process, time.monotonic(), None, None
    nonce = worker.nonce

    def read() -> None:
        assert process.stdout is not None
        with process.stdout as lines:
            for line in lines:
                payload = genuine(line, nonce, process.pid)
                if payload is None:
                    continue
                try:
                    events.put((worker, process, read_event(payload, "a worker's event")))
                except UsageError as error:
                    process.kill()
                    events.put((worker, process, Lost(str(error))))
                    break
        process.wait()
        events.put((worker, process, None))

    def ended() -> None:  # a descendant that holds the pipe open keeps nobody waiting
        process.wait()
        time.sleep(5.0)
        events.put((worker, process, None))

    threading.Thread(target=read, daemon=True).start()
    threading.Thread(target=ended, daemon=True).start()


def _death(worker: Worker) -> str:
    assert worker.process is not None and worker.errors is not None
    code = worker.process.returncode
    said = worker.errors.read_text(errors="replace")
    why = gpu.cause(said.splitlines())
    how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
    return " ".join(filter(None, [f"the process ended ({how})", gpu.fatal(said)])) + (f": {why[:300]}" if why else "")


def place_of(worker: Worker) -> Path:
    """The file in which the worker's process keeps which part of an implementation runs."""
    assert worker.errors is not None
    return worker.errors.with_suffix(".place")


def lost_row(
    started: Started, verdict: Verdict, message: str, device: str, part: str = "", reference: str | None = None
) -> Row:
    """The row of an implementation that did not come back from this part of it ("": no call of it was running).

    A `reference` that was judged on the case shows that it can be run: then the candidate is to blame.
    """
    from parity.case.case import Case
    from parity.compare.result_rows import empty_row
    from parity.registry import family, load
    from parity.trainers import catalogue

    made = Case.from_json(started.data)
    known = (load() | catalogue.implementations()).get(started.implementation)
    row = empty_row(
        family(made.family),
        made,
        started.implementation,
        device,
        verdict=verdict,
        message=message,
        role=known.role if known else "candidate",
        against=reference,
    )
    unknown = ""
    if not part:
        unknown = "no call of it was running"
    elif row.role == "reference" and catalogue.is_trainer(made.family):
        unknown = "in a check, which runs the trainer and its definition"
    elif row.role == "reference":
        row.blame = "reference"
    elif row.against:
        row.blame = "candidate"
    else:
        unknown = NO_REFERENCE
    row.message += f"; {UNKNOWN}{unknown}" if unknown else ""
    return replace(row, case=started.case)
