"""Starts the worker processes, passes their rows on, and gives a verdict when one hangs or dies."""

from __future__ import annotations

import dataclasses
import json
import os
import queue
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from parity.errors import UsageError
from parity.process import environment, interpreter
from parity.results.row import Row, Verdict
from parity.running import cpu_limit
from parity.running.events import At, Done, Event, Judged, Lost, ShardDone, Shrinking, Started
from parity.running.events import read as read_event

MAX_RESTARTS = 20


@dataclasses.dataclass
class Worker:
    """A worker process with the shards it still has to do.

    `last`: when it said something last; `computed`: its CPU time when it had been silent since, None before that.
    """

    plan: dict[str, Any]
    shards: list[dict[str, Any]]
    process: subprocess.Popen[str] | None = None
    started: Started | None = None
    at: int = 0
    shrinking: bool = False
    last: float = 0.0
    computed: float | None = None
    restarts: int = 0
    errors: Path | None = None
    finished: bool = False


def run(plans: list[dict[str, Any]], timeout: float, first_timeout: float) -> Iterator[Event]:
    """Run every plan in a process of its own and yield its events and, for one that is given up, `Lost`.

    An implementation that is silent for `timeout` seconds of CPU time (the first of a process: `first_timeout`, it
    imports), or for `cpu_limit.BACKSTOP` times as many on the clock, is killed: its row is timed-out. A process that ends
    before it is done gives a crashed row. Either way a new process goes on behind the case, without that implementation
    on it.
    """
    events: queue.Queue[tuple[Worker, Event | None]] = queue.Queue()
    workers = [Worker(plan, list(plan["shards"])) for plan in plans]
    with tempfile.TemporaryDirectory(prefix="parity-") as folder:
        for number, worker in enumerate(workers):
            worker.errors = Path(folder) / f"stderr-{number}"
            _start(worker, events, Path(folder))
        try:
            while not all(w.finished for w in workers):
                try:
                    worker, event = events.get(timeout=0.5)
                except queue.Empty:
                    for worker in workers:
                        message = _silent(worker, timeout if worker.started else first_timeout)
                        if message:
                            assert worker.process is not None
                            worker.process.kill()
                            worker.process.wait()
                            yield from _lost(worker, events, Path(folder), message, "timed-out")
                    continue
                worker.last, worker.computed = time.monotonic(), None
                if event is None:
                    if worker.finished or worker.process is None or worker.process.poll() is None:
                        continue
                    yield from _lost(worker, events, Path(folder), _death(worker), "crashed")
                    continue
                _noted(worker, event)
                yield event
        finally:
            for worker in workers:
                if worker.process is not None and worker.process.poll() is None:
                    worker.process.kill()


def _silent(worker: Worker, limit: float) -> str:
    """Why a worker has been silent for too long, or nothing; on a loaded machine the clock alone says little."""
    if worker.finished or worker.process is None:
        return ""
    if worker.computed is None:
        worker.computed = cpu_limit.cpu_time(worker.process.pid)
    waited = time.monotonic() - worker.last
    if waited <= limit:
        return ""
    spent = cpu_limit.cpu_time(worker.process.pid) - worker.computed
    over = spent > limit or waited > cpu_limit.BACKSTOP * limit
    return f"no answer for {waited:.0f} s, {spent:.0f} s of them CPU time" if over else ""


def _noted(worker: Worker, event: Event) -> None:
    """Keep what a new process would have to know."""
    match event:
        case Started():
            worker.started = event
        case At():
            worker.at, worker.shrinking = event.number, False
        case Shrinking():
            worker.shrinking = True
        case ShardDone():
            worker.shards.pop(0)
            worker.at = 0
        case Done() | Lost():
            worker.finished = True


def _start(worker: Worker, events: Any, folder: Path) -> None:
    assert worker.errors is not None
    plan = folder / f"{worker.errors.name}.json"
    plan.write_text(json.dumps(worker.plan | {"shards": worker.shards}))
    env = os.environ | environment(worker.plan["device"], worker.plan["threads"])
    command = [*interpreter("parity.running.worker:main"), str(plan)]
    with worker.errors.open("w") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, env=env, text=True)
    worker.process, worker.last, worker.started, worker.computed = process, time.monotonic(), None, None

    def read() -> None:
        assert process.stdout is not None
        with process.stdout as lines:
            for line in lines:
                if not line.endswith("\n"):  # the last line of a process that died while it wrote
                    break
                try:
                    events.put((worker, read_event(line, "a worker's event")))
                except UsageError as error:
                    process.kill()
                    events.put((worker, Lost(str(error))))
                    break
        process.wait()
        if worker.process is process:
            events.put((worker, None))

    threading.Thread(target=read, daemon=True).start()


def _death(worker: Worker) -> str:
    assert worker.process is not None and worker.errors is not None
    code = worker.process.returncode
    tail = [line for line in worker.errors.read_text(errors="replace").splitlines() if line.strip()][-1:]
    how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
    return f"the process ended ({how}){': ' + tail[0][:300] if tail else ''}"


def _lost(worker: Worker, events: Any, folder: Path, message: str, verdict: Verdict) -> Iterator[Event]:
    """A row for the implementation that ended the process, and a new process that leaves that pair out."""
    worker.restarts += 1
    if worker.started is None or worker.restarts > MAX_RESTARTS:
        worker.finished = True
        yield Lost(message)
        return
    case, implementation = worker.started.case, worker.started.implementation
    yield Judged(lost_row(worker.started, verdict, message, worker.plan["device"]))
    first = worker.shards[0]
    skip = [*first.get("skip", ()), [case, implementation]]
    first |= {"resume": worker.at, "skip": skip}
    if worker.shrinking or sum(i == implementation for _, i in skip) >= 3:
        # minimising would run into the same wall again; after the third time the implementation is left out
        worker.plan["exclude"] = [*worker.plan.get("exclude", ()), implementation]
    _start(worker, events, folder)


def lost_row(started: Started, verdict: Verdict, message: str, device: str) -> Row:
    """The row of an implementation that did not come back."""
    from parity.case.case import Case
    from parity.judging.rows import empty_row
    from parity.registry import family

    made = Case.from_json(started.data)
    row = empty_row(family(made.family), made, started.implementation, device, verdict=verdict, message=message)
    return replace(row, case=started.case)
