"""A whole run: deal the shards, watch the workers, write rows, decide the exit code."""

import collections
import contextlib
import dataclasses
import fcntl
import os
import random
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import UNSET
from msgspec.structs import replace

from parity.case.inputs import defaults
from parity.case.profiles import PROFILES
from parity.compare.pooled_slope import pooled
from parity.errors import UsageError
from parity.process import Terminated, stopping
from parity.registry import family, load, loss_families
from parity.results.header import Asked, End, Header, Last, Part, Parted
from parity.results.report.rows import parts, read, rewrite, writer
from parity.results.row import Row
from parity.running import outcome, resume, supervisor
from parity.running.deck import Deck
from parity.running.events import Apart, At, Checked, Confirmed, Judged, Lost, ShardDone, Started
from parity.running.findings import Findings
from parity.running.nodes import Nodes
from parity.running.plan import Options, Shard, check, planned
from parity.running.provenance import header, resolve_device
from parity.trainers import catalogue

FIXED_SEED = 20261120
TIMEOUT, FIRST_TIMEOUT = 180.0, 300.0


@dataclasses.dataclass
class RunResult:
    """What a run came to."""

    header: Header
    rows: list[Row]
    stale: list[str]
    lost: list[str]
    exit_code: int
    reasons: list[str]
    options: Options


@dataclasses.dataclass
class State:
    """What there is of a run so far. `cases`: how many of each shard; `parts`: the shards that are done."""

    header: Header
    rows: list[Row] = dataclasses.field(default_factory=list)
    parts: dict[str, Part] = dataclasses.field(default_factory=dict)
    cases: dict[str, int] = dataclasses.field(default_factory=dict)
    lost: list[str] = dataclasses.field(default_factory=list)

    @property
    def done(self) -> int:
        """Cases of the plan that were run."""
        mine = self.header.header.shards
        return sum(count for name, count in self.cases.items() if name in mine)

    @property
    def stale(self) -> list[str]:
        """Ledger entries whose own case agrees now."""
        return sorted(entry for part in self.parts.values() for entry, stale in part.checked.items() if stale)


def execute(
    options: Options,
    progress: Callable[[list[Row], int, int, str, str, float | None], None],
    say: Callable[[str], None] = lambda line: None,
) -> RunResult:
    """Run, writing rows as they come; `progress` is called at every event with the rows, cases done and planned, what runs now,
    which new finding is looked at again ("" before), and the seconds until no more cases are dealt; `say` with lines.

    Where the time is limited, checks of trainers are in an order of the seed: none is the last every night.
    """
    before = None
    if options.resume is not None:
        options, before = resume.again(options)
    check(options)
    device = resolve_device(options.device)
    profile = PROFILES[options.profile]
    seed = options.seed if options.seed is not None else FIXED_SEED if profile.derandomised else secrets.randbits(31)
    nodes = Nodes(options.ray, device, options.workers) if options.ray else None
    plan = planned(dataclasses.replace(options, workers=nodes.count) if nodes else options, device, seed)
    cannot = outcome.cannot(options, device)
    head = header(secrets.token_hex(4), "cpu" if cannot else device, options.profile, seed)
    head.header.ends = True  # with a record of its end: a file without one is of a run that was killed
    every = (*loss_families(), *catalogue.names())
    head.header.dimensions = {n: defaults(family(n).settings) for n in every}
    head.header.asked = options.asked()
    head.header.plan = {shard.name: shard.count for shard in plan.shards}
    mine = head.header.shards
    of, path, begun, ended = sum(mine.values()), options.file, time.monotonic(), 0
    state = State(head)
    with locked(options.reports):
        known = parts(path)
        if before is not None:
            state = resume.state(State, path, head, *before)
            head = state.header
            say(f"going on after {state.done:,} of {of:,} cases")
            rewrite(path, replace(head, parts=list(state.parts.values())), state.rows)
        found = Findings(state.rows, profile, len(plan.extra), options.max_time, options.confirm, options.findings)
        deadline = found.deadline(plan.settings)

        def tell(now: str, stage: str) -> None:
            progress(state.rows, state.done, of, now, stage, None if deadline is None else deadline - time.time())

        deck = Deck(
            sorted(
                (shard for shard in plan.shards if shard.name in mine and shard.name not in state.parts),
                key=lambda shard: _place(shard, seed) if options.max_time is not None else 0.0,
            ),
            known,
            None if options.max_time is None else {},
            deadline,
            lambda: found.sought(plan.shards, state.parts),
        )
        say(nodes.announcement if nodes else plan.announcement)
        with writer(path, append=before is not None) as write:
            if before is None:
                write(head)
            try:
                workers = [plan.settings | one for one in plan.extra]
                limits = TIMEOUT, FIRST_TIMEOUT
                with stopping():
                    if not cannot:
                        _follow(
                            state,
                            nodes.run(plan.settings, deck, head, limits)
                            if nodes
                            else supervisor.run(workers, deck, *limits),
                            found,
                            write,
                            tell,
                        )
            except KeyboardInterrupt as error:
                ended = outcome.TERMINATED if isinstance(error, Terminated) else outcome.INTERRUPTED
        return finish(options, state, device, path, ended, cannot, found.changed, begun)


def _place(shard: Shard, seed: int) -> float:
    return random.Random(f"{seed} {shard.name}").random() if shard.kind == "checks" else 0.0


def _follow(
    state: State,
    events: Iterator[supervisor.Told],
    found: Findings,
    write: Callable[[Any], None],
    progress: Callable[[str, str], None],
) -> None:
    """The events of a run, into its state and its file."""
    run = state.header.run
    roles = {i.id: i.role for i in (load() | catalogue.implementations()).values()}
    checked: dict[str, dict[str, bool | None]] = {}
    shown: dict[str, list[tuple[str, str | None]]] = {}
    apart: dict[str, dict[str, list[tuple[str, str, str]]]] = {}
    now = ""
    for shard, event in events:
        match event:
            case Judged():
                role = roles.get(event.row.implementation, event.row.role)
                state.rows.append(replace(event.row, run=run, role=role, shard=shard.name))
                write(state.rows[-1])
                if event.row.minimised is True:
                    found.freeze(state.rows[-1])
                if event.lost:
                    found.lost(state.rows[-1])
            case Checked():
                checked.setdefault(shard.name, {})[event.entry] = event.stale
            case Confirmed():
                shown[shard.name] = event.shown
                found.confirmed(shard, event.shown)
            case Apart():
                apart[shard.name] = {event.implementation: event.pairs}
            case Lost():
                state.lost.append(event.message)
            case Started():
                now = f"{event.implementation} on {event.case}"
            case At():
                state.cases[shard.name] = event.number
            case ShardDone():
                state.cases[shard.name] = event.cases
                if event.cases == shard.count:
                    part = Part(name=shard.name, cases=event.cases, seconds=event.seconds, spent=event.spent)
                    part.checked, part.shown = checked.get(part.name, {}), shown.get(part.name)
                    part.apart = apart.get(part.name, {})
                    state.parts[part.name] = part
                    write(Parted(part=part, run=run))
        progress(now, found.stage(shard) if shard.kind == "finding" else "")


def finish(
    options: Options,
    state: State,
    device: str,
    path: Path,
    ended: int = 0,
    cannot: str | None = None,
    changed: bool = False,
    begun: float | None = None,
) -> RunResult:
    """The rows about the whole run, the exit code and the record of the end. `changed`: rows that stand in the file have."""
    head, of = state.header, sum(state.header.header.shards.values())
    if changed:
        rewrite(path, replace(head, parts=list(state.parts.values())), state.rows)
    whole = [replace(row, run=head.run, shard=UNSET) for row in pooled(state.rows)]
    state.rows += whole
    stale = state.stale
    code, reasons = (
        (outcome.NOTHING, [cannot]) if cannot else outcome.judge_run(options, state.rows, stale, state.lost, device)
    )
    complete = state.done == of and not ended and not state.lost
    if ended:
        code, reasons = ended, [f"stopped after {state.done:,} of {of:,} cases", *reasons]
    elif not (complete or cannot):
        why = "a worker was lost" if state.lost else "the time was over"
        reasons = [*reasons, f"{why}: {stopped_after(head.header.shards, state.cases)}"]
    head.end = End(cases=state.done, of=of, complete=complete, exit_code=code)
    with writer(path, append=True) as write:
        for row in whole:
            write(row)
        write(Last(end=head.end, run=head.run))
    head.parts = list(state.parts.values())
    if begun is not None:
        head.header.seconds = round(time.monotonic() - begun, 1)
    return RunResult(head, state.rows, stale, state.lost, code, reasons, options)


def read_back(path: Path, exit_code: int, reasons: Sequence[str]) -> RunResult:
    """A run that came to its end, from its file: every row that it wrote, those of shards that its time cut short too."""
    header, rows = read(path)
    state = State(header, rows, {part.name: part for part in header.parts or ()})
    return RunResult(header, rows, state.stale, [], exit_code, [*reasons], Options())


def has(path: Path, seed: int, profile: str) -> bool:
    """Whether a results file is of a run with this seed and profile."""
    with contextlib.suppress(UsageError):
        about = read(path)[0].header
        return (about.seed, about.profile) == (seed, profile)
    return False


def merge(paths: Sequence[Path], out: Path) -> RunResult:
    """Several files of one run as one file, judged as a whole.

    Raises:
        UsageError: for files that are not of one run, naming what differs.
    """
    head, rows = resume.joined(paths)
    parts = {part.name: part for part in head.parts or ()}
    options = Options.of(head.header.asked or Asked(), device="auto", reports=out.parent)
    check(options)
    with locked(out.parent):
        rewrite(out, head, rows)
        head.parts = UNSET
        state = State(head, rows, parts, {name: part.cases for name, part in parts.items()})
        missing = outcome.NOTHING if set(head.header.shards) - set(parts) else 0
        return finish(options, state, head.header.device or "cpu", out, missing)


def stopped_after(plan: Mapping[str, int], cases: Mapping[str, int]) -> str:
    """`policy after 120 of 6,000 cases, …`: the families that did not come to their end."""
    done, of = collections.Counter[str](), collections.Counter[str]()
    for name, count in plan.items():
        done[name.partition(" ")[0]] += cases.get(name, 0)
        of[name.partition(" ")[0]] += count
    return ", ".join(f"{name} after {done[name]:,} of {of[name]:,} cases" for name in of if done[name] < of[name])


@contextlib.contextmanager
def locked(folder: Path, name: str = ".lock") -> Iterator[None]:
    """A folder of reports for one run, or night, at a time: two would write their rows under one header.

    Raises:
        UsageError: naming the process of the other.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open(folder / name, "a+")  # noqa: SIM115 held open as long as the lock is
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
