"""Starts the worker processes, passes their rows on, and gives a verdict when one hangs or dies."""

import contextlib
import dataclasses
import json
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, BinaryIO, TypeAlias

import msgspec
from msgspec.structs import replace

from parity.case.case import Case
from parity.compare.result_rows import Blame, empty_row
from parity.decoding import decode
from parity.errors import UsageError
from parity.process import SCRATCH, interpreter
from parity.protocol import faults
from parity.protocol.exceptions import deepest
from parity.registry import family, load
from parity.results.row import IN_ITS, NO_REFERENCE, STOPPED, UNKNOWN, Row, Verdict
from parity.running import gpu
from parity.running.child import LOOK, Child, Clock, told
from parity.running.plan import At, Event, Judged, Lost, Retired, Shard, ShardDone, Started
from parity.running.shard_queue import THRICE, ShardQueue
from parity.trainers import catalogue

Pair: TypeAlias = tuple[str, str]  # case and implementation
Told: TypeAlias = tuple[Shard, Event]
TIMEOUT, FIRST_TIMEOUT = 180.0, 300.0


@dataclasses.dataclass
class Underway:
    """The case that a worker runs. `rows`: passed on when it is done, so that none is there twice when a fresh process runs the
    case again; `kept`: those that a fresh process does not repeat; `retried`: pairs that had a second chance -> what was started,
    and what a lost CUDA context said."""

    started: Started | None = None
    rows: list[Judged] = dataclasses.field(default_factory=list)
    kept: list[Judged] = dataclasses.field(default_factory=list)
    retried: dict[Pair | None, tuple[Started | None, str]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Worker:
    """A worker process with the shard it has. `clock`: since it said something last, once that is a while ago.
    `streams`: what the process has drawn from; `scratch`: the run's folder; `blocking`: it waits for each CUDA kernel.
    `errors`, `place`: its stderr, and which part of an implementation it runs, in files without a name, so that nothing
    that runs in it can remove them."""

    plan: dict[str, Any]
    scratch: str = ""
    shard: Shard | None = None
    case: Underway = dataclasses.field(default_factory=Underway)
    child: Child | None = None
    clock: Clock | None = None
    finished: bool = False
    blocking: bool = False
    streams: list[tuple[str, int]] = dataclasses.field(default_factory=list)
    errors: BinaryIO = dataclasses.field(default_factory=tempfile.TemporaryFile)
    place: BinaryIO = dataclasses.field(default_factory=tempfile.TemporaryFile)

    def begin(self, blocking: bool = False) -> Child:
        env = dict(gpu.child(self.plan["device"], self.plan.get("gpu")))
        env |= {SCRATCH: self.scratch} | ({faults.BLOCKING: "1"} if blocking else {})
        self.streams, self.blocking, self.case.started = [], blocking, None
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

    def row(self, at: Started, verdict: Verdict, message: str, part: str, lost: int = 1) -> Judged:
        """The row of what did not come back from this part of it."""
        of_case = (one.row for one in (*self.case.kept, *self.case.rows) if one.row.case == at.case and one.row.judged)
        reference = next((row.implementation for row in of_case if row.role == "reference"), None)
        return Judged(lost_row(at, verdict, message, self.plan["device"], part, reference), lost)


def run(
    plans: Sequence[dict[str, Any]],
    shards: ShardQueue,
    timeout: float = TIMEOUT,
    first_timeout: float = FIRST_TIMEOUT,
) -> Iterator[Told]:
    """Give the shards to a process for every plan and yield their events and, for one that is given up, `Lost`.

    An implementation that is silent for `timeout` seconds (`child.Clock`; the first of a process: `first_timeout`, it imports) is
    killed: its row is timed-out. A process that ends before it is done, is stopped by a signal or tells what is no event is given
    one more chance, for that may have come from outside; the second time its row is crashed, and a CUDA context that was lost
    once only is crashed too. Then a new process runs the case again, without that implementation on it. A finding that ends its
    process is not looked at again.
    """
    watch = Watch(shards, plans)
    try:
        yield from watch.follow(timeout, first_timeout)
    finally:
        watch.end()


class Watch:
    """Gives shards to workers and makes of what they say the events of a run."""

    def __init__(self, shards: ShardQueue, plans: Sequence[dict[str, Any]]):
        self.shards = shards
        self.scratch = tempfile.TemporaryDirectory(prefix="parity-run-", ignore_cleanup_errors=True)
        self.workers = [Worker(plan, self.scratch.name) for plan in plans]

    def end(self) -> None:
        """End all processes, and remove what they left in the run's folder."""
        for worker in self.workers:
            worker.end()
            worker.errors.close()
            worker.place.close()
        self.scratch.cleanup()

    def follow(self, timeout: float = TIMEOUT, first_timeout: float = FIRST_TIMEOUT) -> Iterator[Told]:
        """The events of the workers until no shard is left; their processes wait for more."""
        looked = time.monotonic()
        while True:
            for worker in self.workers:
                self.deal(worker)
            busy = {worker.child: worker for worker in self.workers if worker.shard and worker.child}
            if not busy:
                return
            for child, line in told(list(busy)):
                if child is busy[child].child:  # else what one that was given up had still to say
                    busy[child].clock = None
                    yield from self.heard(busy[child], line)
            if time.monotonic() > looked + LOOK:  # however much the others say
                for worker in self.workers:
                    yield from self.looked_at(worker, timeout if worker.case.started else first_timeout)
                looked = time.monotonic()

    def looked_at(self, worker: Worker, limit: float) -> Iterator[Told]:
        """What becomes of a worker that says nothing."""
        child = worker.child
        if worker.shard is None or child is None:
            return
        clock = worker.clock = worker.clock or Clock(child.process.pid)
        if message := clock.over(limit):
            message += where(child.process, worker.said)
            yield from self.lost(worker, message, "timed-out", THRICE if clock.asleep else 1)

    def deal(self, worker: Worker) -> None:
        """The next shard for a worker that has none."""
        if worker.shard is None and not worker.finished and (shard := self.shards.take(worker.streams)):
            worker.shard = shard
            ended = worker.child is not None and worker.child.process.poll() is not None
            if worker.blocking or ended or (shard.sought is not None and shard.sought.fresh):
                worker.end()
            self.start(worker)

    def start(self, worker: Worker, blocking: bool = False) -> None:
        """Tell a worker its shard; where it has no process, a new one."""
        assert worker.shard is not None
        child = worker.child or worker.begin(blocking)
        shard = self.shards.able(worker.shard)
        if shard.kind == "drawn":
            worker.streams.append((shard.family, shard.index))
        worker.clock = None
        assert child.process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended: what it says next is that
            child.process.stdin.write(json.dumps(msgspec.to_builtins(shard)) + "\n")
            child.process.stdin.flush()

    def heard(self, worker: Worker, line: bytes | None) -> Iterator[Told]:
        """The event that a worker told, None when it has ended, behind the rows of a case that is done."""
        shard = worker.shard
        if shard is None:  # where it ended between two shards, the next one has a new process
            return
        if line is None:
            assert worker.child is not None
            yield from self.lost(worker, death(worker.child.how, worker.said()))
            return
        try:
            event: Event = decode(Event, line, "a worker's event")
        except UsageError as error:
            yield from self.lost(worker, str(error))
            return
        match event:
            case Judged():
                worker.case.rows.append(event)
                return
            case Lost():
                yield from self.given_up(worker, event)
                return
            case Retired():
                yield from self.lost(worker, "", retired=True)
                return
            case Started():
                worker.case.started = event
            case At() if event.number != shard.resume:  # else the process before this one has said so
                yield from self.of_case(worker, shard)
                worker.shard = replace(shard, resume=event.number)
            case ShardDone():
                yield from self.of_case(worker, shard)
                worker.shard = None
                self.shards.back(shard, event.seconds)
        yield shard, event

    def of_case(self, worker: Worker, shard: Shard) -> Iterator[Told]:
        """The rows of the case that is done, and one for what lost a CUDA context and came back the second time."""
        case = worker.case
        rows = [*case.kept, *case.rows]
        for pair, (at, message) in case.retried.items():
            stopped = any((r.row.case, r.row.implementation) == pair and r.row.verdict in STOPPED for r in rows)
            if at is not None and message and not stopped:
                hidden = f" with {faults.BLOCKING}=1" if worker.blocking else ""
                rows.append(worker.row(at, "crashed", f"{message}; not again{hidden}", "call"))
                self.shards.hold(at.implementation)
        worker.case = Underway()
        yield from ((shard, row) for row in rows)

    def given_up(self, worker: Worker, why: Lost) -> Iterator[Told]:
        """A worker that is not started again, and its shard, with the rows that there are."""
        shard, worker.shard, worker.finished = worker.shard, None, True
        assert shard is not None
        self.shards.back(shard)
        yield from self.of_case(worker, shard)
        yield shard, why

    def lost(
        self, worker: Worker, message: str, verdict: Verdict = "crashed", times: int = 1, retired: bool = False
    ) -> Iterator[Told]:
        """A new process; where the pair had its second chance, one that leaves it out, and a row, as so many losses."""
        shard, case = worker.shard, worker.case
        assert shard is not None
        worker.end()
        pair = (case.started.case, case.started.implementation) if case.started else None
        if shard.kind == "finding":
            worker.shard, worker.case = None, Underway()
            self.shards.back(shard)
            return
        once_more = verdict == "crashed" and not retired and pair not in case.retried
        if once_more:
            case.retried[pair] = case.started, message if faults.says(message) else ""
        elif pair is None:
            yield from self.given_up(worker, Lost(message))
            return
        else:
            if retired:
                case.kept += [one for one in case.rows if (one.row.case, one.row.implementation) == pair]
            elif case.started:
                part = faults.kept_place(worker.place)
                message += f"{IN_ITS}{part}" if part else ""
                case.kept.append(worker.row(case.started, verdict, message, part, times))
            self.shards.hold(pair[1], times)
            worker.shard = replace(shard, skip=(*shard.skip, pair))
        case.rows.clear()
        self.start(worker, blocking=once_more)


def death(how: str, said: str) -> str:
    """How a process ended, where a signal ended it, and the line of its stderr that says why."""
    why, stacks = cause(said.splitlines()), said.rpartition("Fatal Python error: ")
    place = at(stacks[2]) if stacks[1] else ""
    return f"the process ended ({how})" + (f" at {place}" if place else "") + (f": {why[:300]}" if why else "")


def cause(lines: Sequence[str]) -> str:
    """The line of a dead process's stderr that says why: a CUDA error or a failed assertion before advice that follows it."""
    stripped = [line.strip() for line in lines if line.strip()]
    for sign in ("CUDA error", "Assertion", "out of memory", "Error:", "Fatal Python error: "):
        found = [line for line in stripped if sign in line]
        if found:
            return found[-1] if sign == "Error:" else found[0]
    return stripped[-1] if stripped else ""


def where(process: subprocess.Popen[str], said: Callable[[], str]) -> str:
    """ "; in file:line function" of a worker that does not answer, in a library's code if it is in one; `said`: its stderr."""
    had = len(said())
    with contextlib.suppress(OSError):
        process.send_signal(gpu.WHERE)
    until = time.monotonic() + 2.0
    while len(said()) == had and time.monotonic() < until and process.poll() is None:
        time.sleep(0.05)
    time.sleep(0.05)
    found = at(said()[had:])
    return f"; in {found}" if found else ""


def at(stacks: str) -> str:
    """`deepest` of what `faulthandler` wrote, the innermost frame first."""
    return deepest(re.findall(r'File "(.+)", line (\d+) in (.+)', stacks)[::-1])


def lost_row(
    started: Started, verdict: Verdict, message: str, device: str, part: str = "", reference: str | None = None
) -> Row:
    """The row of an implementation that did not come back from this part of it ("": no call of it was running). A
    `reference` that was judged on the case shows that it can be run: then the candidate is to blame."""
    case = Case.from_json(started.data)
    known = load().get(started.implementation)
    about = {"verdict": verdict, "message": message, "role": known.role if known else "candidate"}
    row = empty_row(family(case.family), case, started.implementation, device, **about)
    row.case, row.against, unknown = started.case, reference, ""
    if not part:
        unknown = "its process ended between two calls"
    elif row.role == "reference" and catalogue.is_trainer(case.family):
        unknown = "in a check, which runs the trainer and its definition"
    elif row.role == "reference" or reference:
        row = Blame(reference).decide(row)
    else:
        unknown = NO_REFERENCE
    row.message += f"; {UNKNOWN}{unknown}" if unknown else ""
    return row
