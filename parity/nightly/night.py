"""One night: proof of life, the long run, the other commands, what changed since the night before, one exit code.

The exit code is the gravest of its parts: 3 before 1 before 4, as for `parity run`. Everything is kept in the reports folder:
results.ndjson, night.json (how it stands), issue.md, and one file of sums in history/.
"""

import dataclasses
import datetime
import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace

from parity import data
from parity.case.drawing import cases, draws
from parity.case.inputs import Inputs
from parity.errors import AGREE, INTERRUPTED, NEW, NOTHING, STALE, TERMINATED, USAGE, UsageError
from parity.implementations.implementation import Implementation, Outputs
from parity.nightly import journal, steps
from parity.nightly.journal import Journal
from parity.process import prepare
from parity.registry import NAMES, loss_family, run_case
from parity.results import memory, notify, trend
from parity.results.report.rows import read
from parity.results.report.summary import Summary, summarise
from parity.results.report.wording import count
from parity.running import run as running
from parity.running.plan import Options
from parity.running.provenance import resolve_device

UNSLOTH = "2026.10.9"
"""Release of unsloth-zoo that a night judges, in an environment of its own: it does not install beside the newest TRL."""
Job = tuple[str, tuple[str, ...], float]  # name, words of `parity` or `pytest …`, share of a night
COMMANDS: tuple[Job, ...] = (
    ("history", ("history",), 0.12),
    ("mutants", ("pytest", "-q", "-m", "slow", str(data.cases_dir() / "selftest" / "mutants")), 0.09),
    ("upstream", ("upstream", "--all"), 0.06),
    ("unsloth", ("run", "--with", f"unsloth-zoo=={UNSLOTH}", "--implementation", "unsloth"), 0.06),
)
CUDA: Job = ("cuda", ("pytest", "-q", str(data.cases_dir() / "cuda")), 0.06)  # faults, real vocabularies, Inductor
LEAST = 0.3  # share of a night that its long run has in any case
PROFILE, DEFAULT = "nightly", 6 * 3600.0


def run(
    night: Options, say: Callable[[str], None], progress: Any, others: Sequence[Job] = COMMANDS
) -> tuple[int, trend.Change | None]:
    """The night from proof to page, with the options of its long run, `max_time` for everything, and `others`; the exit
    code, and what changed since the run before (None: there is no whole run)."""
    history, seed, whole_time = night.reports / "history", night.seed, night.max_time or DEFAULT
    with running.locked(night.reports, journal.LOCK):
        if night.resume:
            book = Journal.again(night.reports)
        else:
            book = Journal(profile=night.profile, began=time.time())
            seed = secrets.randbits(31) if seed is None else seed
        device = resolve_device(night.device)
        shown = "as it was" if seed is None else seed
        say(f"night of {datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC · seed {shown} · {device}")
        book.save(night.reports)
        prepare(device)
        proofs = () if seed is None or night.resume else (proof(name, device, seed) for name in NAMES)
        for holds, line in proofs:
            say(line)
            book.blind += [] if holds else [line]
        if book.blind:
            say("the harness does not see a planted mistake: nothing that it says tonight would mean anything")
            return book.end(night.reports, NOTHING), None
        damaged: list[str] = []
        past = memory.runs(history, damaged.append)
        jobs = [CUDA, *others] if device == "cuda" and others else list(others)
        jobs = [job for job in jobs if job[1][0] != "pytest" or Path(job[1][-1]).is_dir()]  # a wheel has no tests
        ended = next((one for one in past if night.resume and one.id == book.kept), None)
        share = max(LEAST, 1.0 - sum(share for *_, share in jobs))
        limit = share * max(1.0, whole_time - book.spent)
        given = book.profile if night.profile == PROFILE else night.profile
        options = dataclasses.replace(night, profile=given, seed=seed, confirm=True, max_time=limit)
        result = running.execute(options, progress, say) if ended is None else _ended(options, ended)
        result.reasons += [line for line in damaged if line not in result.reasons]
        for reason in result.reasons:
            say(reason)
        if result.exit_code in (INTERRUPTED, TERMINATED):
            say("the night was stopped: parity nightly --resume goes on")
            return result.exit_code, None
        summary, done = summarise(result.header, result.rows), [*ended.steps] if ended else []

        def keep() -> None:
            """Killed from here on, the night is not green, and goes on with the next command."""
            memory.keep(memory.of(summary, result.exit_code, result.reasons, ended=False, steps=done), history)
            book.kept = summary.run
            book.save(night.reports)

        keep()
        ran = {one.name for one in done}
        for number, (name, words, share) in enumerate(jobs):
            if name not in ran:
                left = (whole_time - book.spent) * share / sum(one[2] for one in jobs[number:])
                say(f"{name}: at most {max(left, 0.0) / 60:.0f} min")
                done.append(steps.part(name, words, night.reports, max(left, 0.0)))
                keep()
                say(f"{name}: {done[-1].verdict}, {done[-1].seconds / 60:.0f} min")
        changed = _changed(done, past, summary, result)
        memory.keep(changed.run, history)
        (night.reports / "issue.md").write_text(notify.body(changed), encoding="utf-8")
        return book.end(night.reports, changed.run.exit_code), changed


def _ended(options: Options, run: memory.Run) -> running.RunResult:
    """The long run of a night that was killed after it, from its file: every row, those of shards that its time cut short too."""
    assert options.resume is not None
    running.again(options)  # as it was asked for then
    header, rows = read(options.resume)
    if header.run != run.id:
        raise UsageError(f"{options.resume}: another run has written it since that night was killed: start a new one")
    return running.RunResult(header, rows, exit_code=run.exit_code, reasons=[*run.reasons])


def _changed(
    done: Sequence[memory.CommandOutcome], past: Sequence[memory.Run], summary: Summary, result: running.RunResult
) -> trend.Change:
    """The night beside those before it, with its exit code: the gravest of its parts, 3 where it compared less than usual."""
    code = worst([result.exit_code, *(step.counts for step in done)])
    reasons = [*result.reasons, *(f"{s.name}: {s.verdict}" for s in done if s.counts or not s.whole)]
    found = trend.change(memory.of(summary, code, [*dict.fromkeys(reasons)], steps=done), past)
    if not found.missing or code not in (AGREE, NEW, STALE):
        return found
    why = f"compared less than usual: {count(len(found.missing), 'implementation')}"
    this = replace(found.run, exit_code=NOTHING, reasons=[*found.run.reasons, why])
    return dataclasses.replace(found, run=this)


def worst(codes: Sequence[int]) -> int:
    """The exit code of several parts: what was not compared before what is wrong before what is stale."""
    order = (NOTHING, USAGE, NEW, STALE)
    others = [c for c in codes if c not in (*order, AGREE)]
    return others[0] if others else next((c for c in order if c in codes), AGREE)


CASES = 120  # in which the planted mistake must be caught; it needs fewer than ten


def proof(name: str, device: str, night: int) -> tuple[bool, str]:
    """Whether in a family a planted mistake is caught and a correct implementation beside it is not, and a line about it: its
    definition in float32, right and with the mistake, on another stream of cases each night."""
    of = loss_family(name)

    def right(x: Inputs) -> Outputs:
        return {n: v for n, v in of.oracle(x).items() if n in of.outputs and n not in of.optional}

    def wrong(x: Inputs) -> Outputs:  # the same values, and 101 % of their gradients
        return {n: torch.where(v.isfinite(), v + (v - v.detach()) / 100, v) for n, v in right(x).items()}

    both = [Implementation(call.__name__, name, "candidate", call) for call in (right, wrong)]
    seen, red = 0, set[str]()
    for case in draws(cases(of, ("fp32",), "pr"), f"{night}/{name}/0", CASES):
        seen += 1
        red |= {row.implementation for row in run_case(case, both, device, thorough=False) if row.failing}
        if "wrong" in red:
            break
    result = f"caught after {seen} cases" if "wrong" in red else f"NOT caught in {seen} cases"
    beside = "; a correct implementation was called wrong" if "right" in red else ""
    return red == {"wrong"}, f"{name} on {device}: planted gradients 1 % too large: {result}{beside}"
