"""One night: proof of life, the long run, the other commands, what changed since the night before, one exit code.

The exit code is the gravest of its parts: 3 before 1 before 4, as for `parity run`. Everything is kept in the reports folder:
results.ndjson, night.json (the steps), issue.md, and one file of sums in history/.
"""

from __future__ import annotations

import dataclasses
import datetime
import secrets
import shlex
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name
from packaging.version import Version

from parity import data
from parity.errors import UsageError
from parity.nightly import budget, steps
from parity.nightly import record as records
from parity.nightly.proof import proof
from parity.nightly.record import Record
from parity.process import prepare
from parity.results import memory, notify, trend
from parity.results.memory import Run
from parity.results.report.rows import read
from parity.results.report.summary import summarise
from parity.results.report.wording import count
from parity.results.row import STOPPED
from parity.results.turns import TRIES, Turns, set_aside
from parity.rollouts import vllm_engine
from parity.running import outcome
from parity.running import run as running
from parity.running.chosen import described
from parity.running.provenance import resolve_device, versions

RUN, CUDA = "run", "cuda"
SHARE_OF_CUDA = 0.06
"""Share of a night that the tests of cases/cuda usually take on a GPU box."""
UNSLOTH = "2026.10.9"
"""Release of unsloth-zoo that a night judges, in an environment of its own: it does not install beside the newest TRL."""
BISECTED = ("trl", "liger-kernel", "transformers", "cut-cross-entropy", "unsloth-zoo")
"""Packages between whose releases `parity bisect` can search."""
SEARCHED = (0, 1)
"""Exit codes of a search that came to its end."""
SEARCH = 0.25
"""Of a night after a version moved, what its long run leaves for a search at the least."""
BISECTS, BISECT_SHARE = 2, 0.5
"""Packages that are searched on the first red night, and the share of what time is left for that."""


@dataclasses.dataclass(frozen=True)
class Night:
    """What to do, and where. `max_time` in seconds on the clock; `others`: (name, words of `parity`, usual share of a night)."""

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
    others: tuple[tuple[str, tuple[str, ...], float], ...] = (
        ("history", ("history",), 0.12),
        ("mutants", ("mutants",), 0.09),
        ("upstream", ("upstream", "--all"), 0.03),
        ("unsloth", ("run", "--with", f"unsloth-zoo=={UNSLOTH}", "--implementation", "unsloth"), 0.06),
        *([("rollouts", ("rollouts", "live"), 0.06)] if vllm_engine.distribution() else []),
    )


def run(night: Night, say: Callable[[str], None], progress: Any) -> tuple[int, trend.Change | None]:
    """The night from proof to page; the exit code, and what changed since the run before (None: it never began)."""
    record = _begun(night)
    say(f"night of {datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC · seed {record.seed} · {record.device}")
    record.write(night.reports, "proof")
    prepare(record.device, threads=1)
    record.proofs = record.proofs or proof(record.device, record.seed)
    for one in record.proofs:
        say(str(one))
    if not all(one.holds for one in record.proofs):
        say("the harness does not see a planted mistake: nothing that it says tonight would mean anything")
        record.exit_code = outcome.NOTHING
        record.write(night.reports, "done")
        return outcome.NOTHING, None

    damaged = [*filter(None, (set_aside(path) for path in sorted((night.reports / "turns").glob("*.json"))))]
    past = memory.runs(night.reports / "history", damaged.append)
    going_on, already = (
        night.resume and running.has(night.reports / "results.ndjson", record.seed, record.profile),
        None,
    )
    if going_on:  # tonight may be kept already
        tonight = read(night.reports / "results.ndjson")[0].run
        already = next((one for one in past if record.run and one.id == tonight), None)
        past = [one for one in past if one.id != tonight]
    for line in damaged:
        say(line)
    usual = {name: share for name, _, share in night.others}
    shares = budget.parts(past, usual | {RUN: max(0.3, 1.0 - sum(usual.values()))})
    green, here = next((one for one in reversed(past) if one.green), None), versions()
    if green is not None and any(green.versions.get(name, "") != here.get(name, "") for name in BISECTED):
        shares[RUN] = min(shares[RUN], 1.0 - SEARCH)
    record.write(night.reports, RUN)
    share = shares.pop(RUN)
    if already:
        result = running.read_back(night.reports / "results.ndjson", already.exit_code, already.reasons)
    else:
        result = _long_run(night, record, past, share, going_on, say, progress)
    result.reasons += [line for line in damaged if line not in result.reasons]
    for reason in result.reasons:
        say(reason)
    if result.exit_code in (outcome.INTERRUPTED, outcome.TERMINATED):
        say("the night was stopped: parity nightly --resume goes on")
        return result.exit_code, None
    summary = summarise(result.header, result.rows)

    def kept(code: int, reasons: Sequence[str], ended: bool = True) -> trend.Change:
        this = memory.remember(summary, code, night.reports / "history", ended, reasons, record.steps)
        record.run, record.kept = True, summary.run
        return trend.change(this, past)

    jobs = [(name, list(words), shares[name]) for name, words, _ in night.others]
    jobs.sort(key=lambda job: list(shares).index(job[0]))
    begun = kept(result.exit_code, result.reasons, ended=False)  # killed from here on, the night is not green
    record.write(night.reports, RUN)
    searches = list(bisects(begun, night.reports))
    tests = data.cases_dir() / CUDA
    if record.device == "cuda" and night.others and tests.is_dir():  # faults, real vocabularies, Inductor
        jobs.insert(0, (CUDA, ["-q", str(tests)], SHARE_OF_CUDA))
    jobs[:0] = [(f"bisect {words[1]}", words, BISECT_SHARE / len(searches)) for words in searches]
    for number, (name, words, share) in enumerate(jobs):
        if name in {step.name for step in record.steps}:
            continue
        left = night.max_time - (time.time() - record.began)
        limit = left * share / sum(one[2] for one in jobs[number:])
        record.write(night.reports, name, max(limit, 0.0))
        say(f"{name}: at most {max(limit, 0) / 60:.0f} min")
        record.steps.append(steps.part(name, words, night.reports, limit, "pytest" if name == CUDA else ""))
        say(f"{name}: {record.steps[-1].verdict}, {record.steps[-1].seconds / 60:.0f} min")

    code = worst([result.exit_code, *(step.counts for step in record.steps if step.counts is not None)])
    bad = [step for step in record.steps if step.counts or not (step.whole or step.search)]
    reasons = [*dict.fromkeys([*result.reasons, *(f"{step.name}: {step.verdict}" for step in bad)])]
    changed = kept(code, reasons)
    if changed.missing and code in (outcome.AGREE, outcome.NEW, outcome.STALE):
        code = outcome.NOTHING
        changed = kept(code, [*reasons, f"compared less than usual: {count(len(changed.missing), 'implementation')}"])
    (night.reports / "issue.md").write_text(notify.body(changed), encoding="utf-8")
    record.exit_code = code
    record.write(night.reports, "done")
    return code, changed


def _begun(night: Night) -> Record:
    """A new night, or with `resume` the one that was killed.

    Raises:
        UsageError: where another one is under way.
    """
    if other := records.alive(night.reports):
        raise UsageError(f"{night.reports}: process {other} is running a night there; choose another --reports")
    if night.resume:
        profile = None if night.profile == Night.profile else night.profile
        device = None if night.device == "auto" else night.device
        return Record.read(
            night.reports,
            seed=night.seed,
            device=device,
            profile=profile,
            families=list(night.families),
            implementations=list(night.implementations),
        )
    return Record(
        seed=secrets.randbits(31) if night.seed is None else night.seed,
        device=resolve_device(night.device),
        profile=night.profile,
        families=list(night.families),
        implementations=list(night.implementations),
        began=time.time(),
    )


def _long_run(
    night: Night,
    record: Record,
    past: Sequence[Run],
    share: float,
    going_on: bool,
    say: Callable[[str], None],
    progress: Any,
) -> running.RunResult:
    """The run of tonight's seed, begun or gone on with."""
    path = night.reports / "results.ndjson"
    left = max(1.0, night.max_time - (time.time() - record.began))
    now = [(i.id, i.family) for i in described(tuple(record.implementations), tuple(record.families))]
    options = running.Options(
        profile=record.profile,
        families=tuple(record.families),
        implementations=tuple(record.implementations),
        device=night.device,
        seed=record.seed,
        require=() if going_on else required(past, record.profile, record.device, {id for id, _ in now}),
        ledger=night.ledger,
        reports=night.reports,
        confirm=True,
        ray=night.ray,
        max_time=share * left,
        resume=path if going_on else None,
    )
    alive = record.beating(night.reports, RUN)

    def seen(*told: Any) -> None:
        alive()
        progress(*told)

    weights = budget.families(past, record.device, now, versions())
    return running.execute(options, seen, say, weights, Turns.read(night.reports / "turns" / "run.json"))


def bisects(changed: trend.Change, reports: Path) -> Iterator[list[str]]:
    """The searches of the first red night after a version moved: between the last green night's release and tonight's.

    Again, `TRIES` times in all, where it had no end for want of time or of an environment. The library of the finding first; the
    words of `parity`.
    """
    green, before = changed.green, changed.before
    if green is None or before is None:
        return
    owed = any(step.search and step.exit_code not in SEARCHED for step in before.steps)
    again = [key for key in changed.still if owed and changed.lives[key].times <= TRIES]
    keys = changed.new if before.id == green.id else again
    findings = [f for k in keys if (f := changed.lives[k].now) is not None and f.replay]
    if not findings:
        return
    finding = min(findings, key=lambda f: ".py:" in f.implementation)  # a release hardly explains a user's own
    moved = [name for name in BISECTED if name in changed.moved and "-" not in changed.moved[name]]
    moved.sort(key=lambda name: not finding.implementation.startswith(name.partition("-")[0]))
    for name in moved[:BISECTS]:
        good, bad = changed.moved[name]
        find = ["--find", "fixed"] if Version(bad) < Version(good) else []  # a release was taken back
        case = shlex.split(finding.replay)[2]
        wrong = ["--failure", finding.verdict] if finding.verdict in STOPPED else []
        words = ["bisect", str(canonicalize_name(name)), "--good", good, "--bad", bad, *find, *wrong, "--case", case]
        yield [*words, "--implementation", finding.implementation, "--reports", str(reports)]


def worst(codes: Sequence[int]) -> int:
    """The exit code of several parts: what was not compared before what is wrong before what is stale."""
    order = (outcome.NOTHING, outcome.USAGE, outcome.NEW, outcome.STALE)
    others = [c for c in codes if c not in (*order, outcome.AGREE)]
    return others[0] if others else next((c for c in order if c in codes), outcome.AGREE)


def required(past: Sequence[Run], profile: str, device: str, known: Collection[str]) -> tuple[str, ...]:
    """What the last green run of this profile and device compared, as far as it is `known` tonight, to be held to it.

    What is not is missed by `trend.change`.
    """
    green = [r for r in past if r.green and (r.profile, r.device) == (profile, device)]
    if not green:
        return ()
    counts: dict[tuple[str, str], int] = {}
    for (implementation, _, where), cases in green[-1].compared.items():
        counts[implementation, where] = counts.get((implementation, where), 0) + cases
    enough = outcome.MINIMUM_REQUIRED
    return tuple(f"{i}:{d}" for (i, d), n in sorted(counts.items()) if n >= enough and i in known)
