"""A whole run: deal the shards, watch the workers, write rows, decide the exit code."""

import dataclasses
import math
import random
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from msgspec import UNSET
from msgspec.structs import replace

from parity.case.profiles import PROFILES
from parity.compare.pooled_slope import pooled
from parity.errors import INTERRUPTED, NOTHING, TERMINATED, UsageError
from parity.process import Terminated, stopping
from parity.results.report.rows import Writer
from parity.results.row import End, Last, Part, Parted, Row
from parity.running import outcome, supervisor
from parity.running.findings import Findings
from parity.running.nodes import Nodes
from parity.running.plan import At, Confirmed, Judged, Lost, Options, Shard, ShardDone, Started, check, planned
from parity.running.provenance import header, resolve_device
from parity.running.shard_queue import ShardQueue, expected
from parity.running.state import RunResult, again, locked, same

FIXED_SEED = 20261120


def execute(
    options: Options,
    progress: Callable[[list[Row], int, int, float, str, float | None], None],
    say: Callable[[str], None] = lambda line: None,
) -> RunResult:
    """Run, writing rows as they come; `progress` is called at every event with the rows, cases done and planned, the
    share of the work that is done, what runs now, and the seconds until no more cases are dealt. Where the time is
    limited, checks of trainers are in an order of the seed: none is the last every night."""
    before = None
    if options.resume is not None:
        options, before = again(options)
    check(options)
    device = resolve_device(options.device)
    profile = PROFILES[options.profile]
    seed = options.seed if options.seed is not None else FIXED_SEED if profile.derandomised else secrets.randbits(31)
    nodes = Nodes(options.ray, device, options.workers) if options.ray else None
    plan = planned(dataclasses.replace(options, workers=nodes.count) if nodes else options, device, seed)
    cannot = outcome.cannot(options, device)
    head = header(secrets.token_hex(4), "cpu" if cannot else device, options.profile, seed)
    head.header.ends = True  # with a record of its end: a file without one is of a run that was killed
    head.header.asked = options.asked()
    head.header.plan = {shard.name: shard.count for shard in plan.shards}
    of, path, begun = sum(head.header.shards.values()), options.file, time.monotonic()
    with locked(options.reports):
        if before is not None:
            same(path, before.header, head)
            if before.header.header.plan != head.header.plan:
                raise UsageError(f"{path}: its run was planned otherwise: run anew")
            say(f"going on after {before.done:,} of {of:,} cases")
            before.rewrite(path)
        state = before or RunResult(head)
        state.options = options
        found = Findings(state.rows, profile, len(plan.workers), options)
        deadline = plan.settings["deadline"]
        costs = {shard.name: expected(shard) / shard.count for shard in plan.shards}
        whole = sum(map(expected, plan.shards))
        done, share = 0, 0.0

        def tell(now: str, moved: bool) -> None:
            nonlocal done, share
            if moved:  # else a run of thousands of shards would sum over them at each row
                done = state.done
                share = sum(costs.get(name, 0.0) * count for name, count in state.cases.items()) / (whole or 1.0)
            progress(state.rows, done, of, share, now, None if deadline is None else deadline - time.time())

        def again_later() -> list[Shard]:
            until = math.inf if options.max_time is None else begun + options.max_time
            shards = found.sought(plan.shards, state.parts, max(until - time.monotonic(), 0.0))
            names = sorted({row.implementation for row in state.rows if row.new})
            if shards:
                say(f"new findings in {', '.join(names)}; {len(shards)} of them run again (--no-minimise ends sooner)")
            return shards

        left = [shard for shard in plan.shards if shard.name not in state.parts]
        if options.max_time is not None:
            left.sort(key=lambda s: random.Random(f"{seed} {s.name}").random() if s.kind == "checks" else 0.0)
        queue = ShardQueue(left, deadline, again_later)
        say(nodes.announcement if nodes else plan.announcement)
        with Writer(path, append=before is not None) as write:
            if before is None:
                write(head)
            try:
                with stopping():
                    if not cannot:
                        on_nodes = nodes and nodes.run(plan.settings, queue, head)
                        events = on_nodes or supervisor.run(plan.workers, queue)
                        _follow(state, events, found, write, tell, say)
            except KeyboardInterrupt as error:
                state.exit_code = TERMINATED if isinstance(error, Terminated) else INTERRUPTED
        state.rewrite(path)  # rows were marked since they were written, and whatever a loss did to the file is undone
        finish(state, device, path, cannot)
        state.header.header.seconds = round(time.monotonic() - begun, 1)
        return state


def _follow(
    state: RunResult,
    events: Iterator[supervisor.Told],
    found: Findings,
    write: Callable[[Any], None],
    progress: Callable[[str, bool], None],
    say: Callable[[str], None],
) -> None:
    """The events of a run, into its state and its file. `progress` is told what runs now, and whether more cases are done."""
    run = state.header.run
    absent = {row.implementation for row in state.rows if row.absent}
    underway: dict[str, Part] = {}
    now, moved = "", True  # what a run goes on with was done before
    for shard, event in events:
        part = underway.setdefault(shard.name, Part(name=shard.name, cases=0))
        news: Iterable[str] = ()
        match event:
            case Judged() if event.row.absent and event.row.implementation in absent:
                pass  # one row says it for the run
            case Judged():
                absent |= {event.row.implementation} if event.row.absent else set()
                row = replace(event.row, run=run, shard=shard.name)
                if row.minimised is True:
                    found.freeze(row)
                row.replay += state.options.own
                if shard.kind in ("drawn", "besides"):  # whose cases only this run's rows have
                    row.replay += state.options.place
                state.rows.append(row)
                write(row)
                news = () if found.fresh else found.news([row])
            case Confirmed():
                part.shown = event.shown
                news = found.news(found.confirmed(shard, event.shown))
            case Lost():
                state.lost.append(event.message)
            case Started():
                now = f"{event.implementation} on {event.case}"
            case At():
                moved, state.cases[shard.name] = True, event.number
            case ShardDone():
                moved, state.cases[shard.name] = True, event.cases
                part.cases = event.cases
                part.seconds = event.seconds
                if event.cases == shard.count:
                    state.parts[part.name] = part
                    write(Parted(part=part, run=run))
        for line in news:
            say(line)
        progress(now, moved)
        moved = False


def finish(state: RunResult, device: str, path: Path, cannot: str | None = None) -> None:
    """The rows about the whole run, its exit code and the record of its end."""
    head, of, ended = state.header, sum(state.header.header.shards.values()), state.exit_code
    whole = [replace(row, run=head.run, shard=UNSET) for row in pooled(state.rows)]
    state.rows += whole
    code, reasons = (NOTHING, [cannot]) if cannot else outcome.judge_run(state.options, state.rows, state.lost, device)
    complete = state.done == of and not ended and not state.lost
    if ended:
        code, reasons = ended, [f"stopped after {state.done:,} of {of:,} cases", *reasons]
    elif not (complete or cannot):
        why = "a worker was lost" if state.lost else "the time was over"
        reasons = [*reasons, f"{why}: stopped after {state.done:,} of {of:,} cases"]
    head.end = End(cases=state.done, of=of, complete=complete, exit_code=code, reasons=list(reasons))
    with Writer(path, append=True) as write:
        for row in whole:
            write(row)
        write(Last(end=head.end, run=head.run))
    head.parts = list(state.parts.values())
    state.exit_code, state.reasons = code, reasons
