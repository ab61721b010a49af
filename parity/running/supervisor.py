"""Starts the worker processes, passes their rows on, and gives a verdict when one hangs or dies."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import os
import queue
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO, TypeAlias

import msgspec
import psutil
from msgspec.structs import replace

from parity.decoding import decode
from parity.errors import UsageError
from parity.process import SCRATCH, interpreter
from parity.protocol import faults
from parity.results.row import IN_ITS, NO_REFERENCE, STOPPED, UNKNOWN, Row, Verdict
from parity.running import cpu_limit, gpu
from parity.running.child import Child
from parity.running.events import At, Event, Judged, Lost, Retired, ShardDone, Started
from parity.running.plan import Shard
from parity.running.shard_queue import ShardQueue

SLEEPING = 2.0
"""Clock ÷ limit for a process that uses next to no CPU time: it waits for something that does not come."""
ASLEEP = 0.05
"""Share of a core below which a process sleeps; one of six that compute on a core has three times as much."""
LOOK = 0.5
"""Seconds between two looks at silent workers."""
HALTED = 5.0
"""Seconds after which a process that a signal has stopped counts as dead: nobody wakes it."""
THRICE = 3
"""Losses of workers to one implementation after which it is left out."""

Pair: TypeAlias = tuple[str, str]
"""Case and implementation."""
Told: TypeAlias = tuple[Shard, Event]


@dataclasses.dataclass
class Worker:
    """A worker process with the shard it has.

    `last`: when it said something last; `computed`: its CPU time and how long it had waited for a core when it had been silent
    since, None before that. `rows`: of the case that runs, passed on when it is done, so that none is there twice when a fresh
    process runs the case again; `kept`: those that a fresh process does not repeat. `retried`: pairs that had a second chance
    -> what was started, and what a lost CUDA context said; `retired`: the pair after which the process asked for a successor.
    `streams`: what the process has drawn from; `scratch`: the run's folder. `errors`, `place`: its stderr, and which part of an
    implementation it runs, in files without a name, so that nothing that runs in it can remove them.
    """

    plan: dict[str, Any]
    shard: Shard | None = None
    child: Child | None = None
    started: Started | None = None
    last: float = 0.0
    computed: tuple[float, float] | None = None
    finished: bool = False
    blocking: bool = False
    rows: list[Judged] = dataclasses.field(default_factory=list)
    kept: list[Judged] = dataclasses.field(default_factory=list)
    retried: dict[Pair | None, tuple[Started | None, str]] = dataclasses.field(default_factory=dict)
    retired: Retired | None = None
    streams: list[tuple[str, int]] = dataclasses.field(default_factory=list)
    scratch: str = ""
    errors: BinaryIO = dataclasses.field(default_factory=tempfile.TemporaryFile)
    place: BinaryIO = dataclasses.field(default_factory=tempfile.TemporaryFile)

    def begin(self, blocking: bool = False) -> Child:
        """A new process; `blocking`: one that waits for each CUDA kernel."""
        env = dict(gpu.child(self.plan["device"], self.plan["threads"], self.plan.get("gpu")))
        env |= {SCRATCH: self.scratch} | ({faults.BLOCKING: "1"} if blocking else {})
        self.streams, self.blocking, self.started = [], blocking, None
        for file, content in ((self.errors, b""), (self.place, json.dumps(self.plan).encode())):
            file.seek(0)
            file.truncate()
            file.write(content)
            file.flush()
        self.child = Child(
            [*interpreter("parity.running.worker:main"), str(self.place.fileno())],
            env=env,
            pass_fds=[self.place.fileno()],
            stdin=subprocess.PIPE,
            stdout=self.errors,
            stderr=self.errors,
            text=True,
            start_new_session=True,  # Ctrl-C is for the watcher, who ends its workers
        )
        return self.child

    def said(self) -> str:
        """What it has written to stderr."""
        descriptor = self.errors.fileno()
        return os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode(errors="replace")

    def end(self) -> None:
        """Kill its process and what that started."""
        if self.child is not None:
            self.child.end()
        self.child = None

    def row(self, at: Started, verdict: Verdict, message: str, part: str) -> Judged:
        """The row of what did not come back from this part of it."""
        told = (one.row for one in (*self.kept, *self.rows) if one.row.case == at.case and one.row.judged)
        reference = next((row.implementation for row in told if row.role == "reference"), None)
        return Judged(lost_row(at, verdict, message, self.plan["device"], part, reference), lost=True)


def run(plans: Sequence[dict[str, Any]], shards: ShardQueue, timeout: float, first_timeout: float) -> Iterator[Told]:
    """Give the shards to a process for every plan and yield their events and, for one that is given up, `Lost`.

    An implementation that is silent for `timeout` seconds of CPU time (the first of a process: `first_timeout`, it
    imports), or on the clock for SLEEPING times as many asleep or `cpu_limit.BACKSTOP` times as many in any case, those in
    which it waited for a core left out, is killed: its row is timed-out. A process that ends before it is done, is stopped
    by a signal or tells what is no event is given one more chance, for that may have come from outside; the second time its
    row is crashed, and a CUDA context that was lost once only is crashed too.
    Then a new process runs the case again, without that implementation on it. A finding that ends its process is not
    looked at again.
    """
    watch = Watch(shards, [Worker(plan) for plan in plans])
    try:
        yield from watch.follow(timeout, first_timeout)
    finally:
        watch.end()


def silent(worker: Worker, limit: float) -> tuple[str, bool]:
    """Why a worker has been silent for too long, or nothing, and whether it slept; on a loaded machine the clock says little."""
    if worker.shard is None or worker.child is None:
        return "", False
    pid = worker.child.process.pid
    if worker.computed is None:
        worker.computed = cpu_limit.cpu_time(pid), cpu_limit.starved(pid)
    waited = time.monotonic() - worker.last
    if waited <= limit:
        return "", False
    spent = cpu_limit.cpu_time(pid) - worker.computed[0]
    waited -= max(0.0, cpu_limit.starved(pid) - worker.computed[1])  # for a core
    asleep = waited > SLEEPING * limit and spent < ASLEEP * waited
    over = asleep or spent > limit or waited > cpu_limit.BACKSTOP * limit
    return (f"no answer for {waited:.0f} s, {spent:.0f} s of them CPU time" if over else ""), asleep


def halted(worker: Worker) -> bool:
    """Whether a signal has stopped a worker."""
    if worker.shard is None or worker.child is None or time.monotonic() - worker.last < HALTED:
        return False
    with contextlib.suppress(psutil.Error):
        return bool(psutil.Process(worker.child.process.pid).status() == psutil.STATUS_STOPPED)
    return False


class Watch:
    """Gives shards to workers and makes of what they say the events of a run."""

    def __init__(self, shards: ShardQueue, workers: list[Worker]):
        self.shards, self.workers = shards, workers
        self.heard: queue.Queue[tuple[Worker, Child, Event | str | None]] = queue.Queue()
        self.excluded: list[str] = []
        self.losses = collections.Counter[str]()
        self.scratch = tempfile.TemporaryDirectory(prefix="parity-run-", ignore_cleanup_errors=True)
        for worker in workers:
            worker.scratch = self.scratch.name

    def end(self) -> None:
        """End all processes, and remove what they left in the run's folder."""
        for worker in self.workers:
            worker.end()
            worker.errors.close()
            worker.place.close()
        self.scratch.cleanup()

    def follow(self, timeout: float, first_timeout: float) -> Iterator[Told]:
        """The events of the workers until no shard is left; their processes wait for more."""
        looked = time.monotonic()
        while True:
            for worker in self.workers:
                self.deal(worker)
            if not any(w.shard for w in self.workers):
                return
            with contextlib.suppress(queue.Empty):
                worker, child, event = self.heard.get(timeout=LOOK)
                if child is worker.child:  # else what one that was given up had still to say
                    worker.last, worker.computed = time.monotonic(), None
                    yield from self.passed_on(worker, child, event)
            if time.monotonic() > looked + LOOK:  # however much the others say
                for worker in self.workers:
                    yield from self.looked_at(worker, timeout if worker.started else first_timeout)
                looked = time.monotonic()

    def looked_at(self, worker: Worker, limit: float) -> Iterator[Told]:
        """What becomes of a worker that says nothing."""
        if halted(worker):
            yield from self.lost(worker, "the process was stopped by a signal", "crashed")
            return
        message, asleep = silent(worker, limit)
        if message and worker.child:
            message += gpu.where(worker.child.process, worker.said)
            yield from self.lost(worker, message, "timed-out", out=asleep)

    def deal(self, worker: Worker) -> None:
        """The next shard for a worker that has none."""
        if worker.shard is None and not worker.finished and (shard := self.shards.take(worker.streams)):
            worker.shard = shard
            if worker.blocking or (shard.sought is not None and shard.sought.fresh):
                worker.end()
            self.start(worker)

    def start(self, worker: Worker, blocking: bool = False) -> None:
        """Tell a worker its shard; where it has no process, a new one."""
        assert worker.shard is not None
        child = worker.child
        if child is None:
            child = worker.begin(blocking)
            threading.Thread(target=self.hear, args=(worker, child), daemon=True).start()
        shard = replace(worker.shard, exclude=(*worker.shard.exclude, *self.excluded))
        if shard.kind == "drawn":
            worker.streams.append((shard.family, shard.index))
        worker.last, worker.computed = time.monotonic(), None
        assert child.process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended: an event says so
            child.process.stdin.write(json.dumps(msgspec.to_builtins(shard)) + "\n")
            child.process.stdin.flush()

    def hear(self, worker: Worker, child: Child) -> None:
        """Queue what a process tells: events, why one is none, and None when it has ended."""
        for line in child.events():
            try:
                self.heard.put((worker, child, decode(Event, line, "a worker's event")))
            except UsageError as error:
                self.heard.put((worker, child, str(error)))
        self.heard.put((worker, child, None))

    def passed_on(self, worker: Worker, child: Child, event: Event | str | None) -> Iterator[Told]:
        """The event, after the rows of a case that is done; keeps what a new process would have to know."""
        shard = worker.shard
        if shard is None:
            if event is None:  # it ended between two shards: the next one has a new process
                worker.end()
            return
        match event:
            case None:
                yield from self.lost(worker, death(child.how, worker.said()), "crashed")
            case str():
                yield from self.lost(worker, event, "crashed")
            case Judged():
                worker.rows.append(event)
            case Lost():
                yield from self.given_up(worker, event)
            case Retired():
                worker.retired = event
                yield from self.lost(worker, "", "crashed")
            case _:
                yield from self.told(worker, shard, event)

    def told(self, worker: Worker, shard: Shard, event: Event) -> Iterator[Told]:
        """What a run hears too."""
        if isinstance(event, Started):
            worker.started = event
        if isinstance(event, At) and event.number != shard.resume:  # else the process before this one has said so
            yield from self.of_case(worker, shard)
            worker.shard = replace(shard, resume=event.number)
        if isinstance(event, ShardDone):
            yield from self.of_case(worker, shard)
            worker.shard = None
            self.shards.back(shard, event.seconds)
        yield shard, event

    def of_case(self, worker: Worker, shard: Shard) -> Iterator[Told]:
        """The rows of the case that is done.

        With one for what lost a CUDA context and came back the second time: a race, or a fault that waiting hides.
        """
        rows = [*worker.kept, *worker.rows]
        for pair, (at, message) in worker.retried.items():
            stopped = any((r.row.case, r.row.implementation) == pair and r.row.verdict in STOPPED for r in rows)
            if at is not None and message and not stopped:
                hidden = f" with {faults.BLOCKING}=1" if worker.blocking else ""
                rows.append(worker.row(at, "crashed", f"{message}; not again{hidden}", "call"))
                self.hold(at.implementation)
        worker.started = None
        for done in (worker.retried, worker.kept, worker.rows):
            done.clear()
        yield from ((shard, row) for row in rows)

    def hold(self, implementation: str, out: bool = False) -> None:
        """One more loss of a worker to this implementation; after THRICE, or `out`, it is left out of all further cases."""
        self.losses[implementation] += 1
        if out or self.losses[implementation] >= THRICE:
            self.excluded.append(implementation)

    def given_up(self, worker: Worker, why: Lost) -> Iterator[Told]:
        """A worker that is not started again, and its shard, with the rows that there are."""
        shard, worker.shard, worker.finished = worker.shard, None, True
        if shard is not None:
            self.shards.back(shard)
            yield from self.of_case(worker, shard)
            yield shard, why

    def lost(self, worker: Worker, message: str, verdict: Verdict, out: bool = False) -> Iterator[Told]:
        """A new process; and where the pair had its second chance, a row for it and a process that leaves it out.

        `out`: the implementation is left out of all further cases at once.
        """
        shard, started, retired = worker.shard, worker.started, worker.retired
        assert shard is not None
        worker.end()
        worker.retired = None
        last = retired or started
        pair = (last.case, last.implementation) if last else None
        if shard.kind == "finding":
            worker.shard = None
            worker.rows.clear()
            self.shards.back(shard)
            return
        once_more = verdict == "crashed" and not retired and pair not in worker.retried
        if once_more:
            worker.retried[pair] = started, message if faults.says(message) else ""
        else:
            if pair is None:
                yield from self.given_up(worker, Lost(message))
                return
            if retired:
                worker.kept += [one for one in worker.rows if (one.row.case, one.row.implementation) == pair]
            elif started:
                part = faults.kept_place(worker.place)
                worker.kept.append(worker.row(started, verdict, message + (f"{IN_ITS}{part}" if part else ""), part))
            deadline = worker.plan.get("deadline")
            late = deadline is not None and time.time() > deadline  # what hangs now is waited for once
            self.hold(pair[1], out or (verdict == "timed-out" and late))
            worker.shard = replace(shard, skip=(*shard.skip, pair))
        worker.rows.clear()
        self.start(worker, blocking=once_more)


def death(how: str, said: str) -> str:
    """How a process ended, where a signal ended it, and the line of its stderr that says why."""
    why = gpu.cause(said.splitlines())
    return " ".join(filter(None, [f"the process ended ({how})", gpu.fatal(said)])) + (f": {why[:300]}" if why else "")


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
