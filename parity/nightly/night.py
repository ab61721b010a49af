"""One night: proof of life, the long run, the other commands, what changed since the night before, one exit code.

The exit code is the gravest of its parts: 3 before 1 before 4, as for `parity run`. Everything is kept in the reports folder:
results.ndjson, night.json (how it stands), issue.md, and one file of sums in history/.
"""

from __future__ import annotations

import dataclasses
import datetime
import secrets
import time
from collections.abc import Callable, Iterator, Sequence, Set
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from parity import data
from parity.errors import UsageError
from parity.nightly import journal, steps
from parity.nightly.journal import Journal
from parity.nightly.proof import proof
from parity.process import prepare
from parity.results import memory, notify, trend
from parity.results.report.summary import Summary, summarise
from parity.results.report.wording import count
from parity.running import outcome
from parity.running import run as running
from parity.running.provenance import resolve_device

UNSLOTH = "2026.10.9"
"""Release of unsloth-zoo that a night judges, in an environment of its own: it does not install beside the newest TRL."""
Job = tuple[str, tuple[str, ...], float]
"""Name, words of `parity` or `pytest …`, share of a night."""
COMMANDS: tuple[Job, ...] = (
    ("history", ("history",), 0.12),
    ("mutants", ("pytest", "-q", "-m", "slow", str(data.cases_dir() / "selftest" / "mutants")), 0.09),
    ("upstream", ("upstream", "--all"), 0.06),
    ("unsloth", ("run", "--with", f"unsloth-zoo=={UNSLOTH}", "--implementation", "unsloth"), 0.06),
)
CUDA: Job = ("cuda", ("pytest", "-q", str(data.cases_dir() / "cuda")), 0.06)
"""Faults, real vocabularies, Inductor."""
LEAST = 0.3
"""Share of a night that its long run has in any case."""


@dataclasses.dataclass(frozen=True)
class Night:
    """What to do, and where. `max_time` in seconds on the clock."""

    max_time: float = 6 * 3600.0
    profile: str = "nightly"
    seed: int | None = None
    device: str = "auto"
    families: tuple[str, ...] = ()
    implementations: tuple[str, ...] = ()
    ledger: Path | None = None
    reports: Path = Path("reports")
    resume: bool = False
    ray: str | None = None
    others: tuple[Job, ...] = COMMANDS


def run(night: Night, say: Callable[[str], None], progress: Any) -> tuple[int, trend.Change | None]:
    """The night from proof to page; the exit code, and what changed since the run before (None: there is no whole run)."""
    history = night.reports / "history"
    with running.locked(night.reports, journal.LOCK):
        if night.resume:
            book, seed = Journal.again(night.reports), night.seed
        else:
            book = Journal(profile=night.profile, began=time.time())
            seed = secrets.randbits(31) if night.seed is None else night.seed
        device = resolve_device(night.device)
        shown = "as it was" if seed is None else seed
        say(f"night of {datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC · seed {shown} · {device}")
        book.save(night.reports)
        prepare(device, threads=1)
        for one in [] if seed is None or night.resume else proof(device, seed):
            say(str(one))
            book.blind += [] if one.holds else [str(one)]
        if book.blind:
            say("the harness does not see a planted mistake: nothing that it says tonight would mean anything")
            return book.end(night.reports, outcome.NOTHING), None
        damaged: list[str] = []
        past = memory.runs(history, damaged.append)
        jobs = [CUDA, *night.others] if device == "cuda" and night.others else list(night.others)
        jobs = [job for job in jobs if job[1][0] != "pytest" or Path(job[1][-1]).is_dir()]  # a wheel has no tests
        ended = next((one for one in past if night.resume and one.id == book.kept), None)
        share = max(LEAST, 1.0 - sum(share for *_, share in jobs))
        result = _long_run(night, seed, book, ended, share, say, progress)
        result.reasons += [line for line in damaged if line not in result.reasons]
        for reason in result.reasons:
            say(reason)
        if result.exit_code in (outcome.INTERRUPTED, outcome.TERMINATED):
            say("the night was stopped: parity nightly --resume goes on")
            return result.exit_code, None
        summary, done = summarise(result.header, result.rows), [*ended.steps] if ended else []

        def keep() -> None:
            """Killed from here on, the night is not green, and goes on with the next command."""
            memory.keep(memory.of(summary, result.exit_code, result.reasons, ended=False, steps=done), history)
            book.kept = summary.run
            book.save(night.reports)

        keep()
        for step in _commands(night, book, jobs, {one.name for one in done}, say):
            done.append(step)
            keep()
        changed = _changed(done, past, summary, result)
        memory.keep(changed.run, history)
        (night.reports / "issue.md").write_text(notify.body(changed), encoding="utf-8")
        return book.end(night.reports, changed.run.exit_code), changed


def _long_run(
    night: Night,
    seed: int | None,
    book: Journal,
    ended: memory.Run | None,
    share: float,
    say: Callable[[str], None],
    progress: Any,
) -> running.RunResult:
    """The run of tonight's seed: begun, gone on with, or where it had ended when the night was killed, read."""
    options = running.Options(
        profile=book.profile if night.profile == Night.profile else night.profile,
        families=night.families,
        implementations=night.implementations,
        device=night.device,
        seed=seed,
        ledger=night.ledger,
        reports=night.reports,
        confirm=True,
        ray=night.ray,
        max_time=share * max(1.0, night.max_time - book.spent),
        resume=night.reports / "results.ndjson" if night.resume else None,
    )
    if ended is None:
        return running.execute(options, progress, say)
    running.again(options)  # as it was asked for then
    path = night.reports / "results.ndjson"
    found = running.read_back(path, ended.exit_code, ended.reasons)
    if found.header.run != ended.id:
        raise UsageError(f"{path}: another run has written it since that night was killed: start a new one")
    return found


def _commands(
    night: Night, book: Journal, jobs: Sequence[Job], done: Set[str], say: Callable[[str], None]
) -> Iterator[memory.CommandOutcome]:
    """The other commands that are not done yet, each in its share of the time that is left."""
    for number, (name, words, share) in enumerate(jobs):
        if name not in done:
            left = night.max_time - book.spent
            limit = max(left * share / sum(one[2] for one in jobs[number:]), 0.0)
            say(f"{name}: at most {limit / 60:.0f} min")
            step = steps.part(name, words, night.reports, limit)
            yield step
            say(f"{name}: {step.verdict}, {step.seconds / 60:.0f} min")


def _changed(
    done: Sequence[memory.CommandOutcome], past: Sequence[memory.Run], summary: Summary, result: running.RunResult
) -> trend.Change:
    """The night beside those before it, with its exit code: the gravest of its parts, 3 where it compared less than usual."""
    code = worst([result.exit_code, *(step.counts for step in done)])
    reasons = [*result.reasons, *(f"{s.name}: {s.verdict}" for s in done if s.counts or not s.whole)]
    found = trend.change(memory.of(summary, code, [*dict.fromkeys(reasons)], steps=done), past)
    if not found.missing or code not in (outcome.AGREE, outcome.NEW, outcome.STALE):
        return found
    why = f"compared less than usual: {count(len(found.missing), 'implementation')}"
    this = replace(found.run, exit_code=outcome.NOTHING, reasons=[*found.run.reasons, why])
    return dataclasses.replace(found, run=this)


def worst(codes: Sequence[int]) -> int:
    """The exit code of several parts: what was not compared before what is wrong before what is stale."""
    order = (outcome.NOTHING, outcome.USAGE, outcome.NEW, outcome.STALE)
    others = [c for c in codes if c not in (*order, outcome.AGREE)]
    return others[0] if others else next((c for c in order if c in codes), outcome.AGREE)
