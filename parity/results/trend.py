"""A run beside those before it: what is new, still there or gone, comparisons that are missing."""

import dataclasses
import datetime
import itertools
import math
import shlex
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence

from parity.results.memory import Run, Seen
from parity.results.report.wording import bisection
from parity.results.row import STOPPED

STILL_FAILS = "not seen; its implementation still fails"  # what is said of a finding in `Change.failing`
NIGHTS = 7  # earlier runs of the same profile and device that a figure is compared with
SHARE, CHANCE = 0.8, 4
"""Comparisons may fall to this share of the median of those runs, and by so many times its square root more: chance lets one
Poisson count in 30,000 fall so far."""
BISECTED = ("trl", "liger-kernel", "transformers", "cut-cross-entropy", "unsloth-zoo")
"""Packages between whose releases `parity bisect` can search."""


@dataclasses.dataclass(frozen=True)
class Story:
    """A finding over all runs: a ledger entry, whatever its implementations, or by key one that no entry covers.
    `times` of the `of` runs that compared one of its implementations saw it. `mended`: the first run after it was last
    seen that compared one. `brought`, `moved`: package -> versions in the runs before and of `first`, before and of
    `mended`."""

    name: str
    known: bool
    implementations: tuple[str, ...]
    message: str
    first: Run
    times: int
    of: int
    mended: Run | None
    brought: Mapping[str, tuple[str, str]]
    moved: Mapping[str, tuple[str, str]]


@dataclasses.dataclass(frozen=True)
class Missing:
    """Comparisons that fell below `SHARE` of what is usual, further than chance does, with no new crash or hang that says why."""

    implementation: str
    family: str
    device: str
    cases: int
    usual: float


@dataclasses.dataclass(frozen=True)
class Change:
    """A run beside those before it: the one before of the same profile and device, and the last green one of these.
    `lives`: by key, every finding of any of these runs. Keys: `new`, what this run finds and no ledger
    entry covers, and the one before had not; `still`, what it had too; `fixed`, what it had and this one compared and
    did not find. `moved`: package -> (version in the last green run, version now)."""

    run: Run
    before: Run | None
    green: Run | None
    lives: Mapping[str, Story]
    new: tuple[str, ...]
    still: tuple[str, ...]
    fixed: tuple[str, ...]
    missing: tuple[Missing, ...]
    moved: Mapping[str, tuple[str, str]]

    @property
    def failing(self) -> tuple[str, ...]:
        """Keys of `fixed` whose implementation has another new finding in the family: the cases may only not have been drawn."""
        then = self.before.by_key if self.before else {}
        fails = {(f.implementation, f.family) for f in self.run.findings if f.known is None}
        return tuple(k for k in self.fixed if (then[k].implementation, then[k].family) in fails)

    @property
    def search(self) -> str:
        """The command that finds the release which brought a new finding, where a library moved since the last green run."""
        found = [f for k in (*self.new, *self.still) if (f := self.run.by_key[k]).replay]
        moved = [name for name in BISECTED if "-" not in self.moved.get(name, "-")]
        if not found or not moved:
            return ""
        finding = min(found, key=lambda f: ".py:" in f.implementation)  # a release hardly explains a user's own
        name = min(moved, key=lambda name: not finding.implementation.startswith(name.partition("-")[0]))
        good, bad = self.moved[name]
        case = shlex.split(finding.replay)[2]
        return bisection(name, good, bad, case, finding.implementation, finding.verdict)


def change(run: Run, earlier: Iterable[Run]) -> Change:
    """`run` beside `earlier` ones, of which those with its profile and device count."""
    past = [r for r in earlier if (r.profile, r.device) == (run.profile, run.device) and r.id != run.id]
    past = sorted((r for r in past if r.started <= run.started), key=lambda r: r.started)
    ended = [r for r in past if r.ended][-NIGHTS:]
    before = past[-1] if past else None
    now, then = run.by_key, before.by_key if before else {}
    fresh = [k for k, f in now.items() if f.known is None]
    green = next((r for r in reversed(past) if r.green), None)
    return Change(
        run=run,
        before=before,
        green=green,
        lives=stories([*past, run], lambda f: f.key),
        new=tuple(k for k in fresh if k not in then),
        still=tuple(k for k in fresh if k in then),
        fixed=tuple(k for k, f in then.items() if k not in now and _compared(run, f)),
        missing=tuple(_missing(run, ended, green)),
        moved=version_changes(green, run) if green else {},
    )


def stories(past: Sequence[Run], key: Callable[[Seen], str] = lambda f: f.known or f.key) -> dict[str, Story]:
    """Every finding of these runs, the oldest first, by its name."""
    by: dict[str, dict[int, list[Seen]]] = {}
    for place, run in enumerate(past):
        for f in run.findings:
            by.setdefault(key(f), {}).setdefault(place, []).append(f)
    out = {}
    for name, places in by.items():
        its = [f for found in places.values() for f in found]
        could = [n for n, run in enumerate(past) if n in places or any(_compared(run, f) for f in its)]
        first, last = min(places), max(places)
        gone = next((n for n in could if n > last), None)
        out[name] = Story(
            *(name, bool(its[0].known), tuple(sorted({f.implementation for f in its})), its[-1].message),
            *(past[first], len(places), len(could), None if gone is None else past[gone]),
            brought=version_changes(past[first - 1], past[first]) if first else {},
            moved={} if gone is None else version_changes(past[gone - 1], past[gone]),
        )
    return out


def releases(past: Sequence[Run]) -> list[tuple[list[Run], dict[str, tuple[str, str]]]]:
    """Runs in a row with the same versions of packages, each with those that moved since the one before."""
    out: list[tuple[list[Run], dict[str, tuple[str, str]]]] = []
    for _, group in itertools.groupby(past, key=lambda run: run.versions):
        runs = list(group)
        out.append((runs, version_changes(out[-1][0][-1], runs[0]) if out else {}))
    return out


def since(first: Run, run: Run, now: str = "since tonight") -> str:
    """Since when, said in `run`, what the run `first` saw first; `now` where that is the same run."""
    if first.id == run.id:
        return now
    days = (run.started.date() - first.started.date()).days
    if not days:
        return f"since {first.started:%H:%M} today"
    day = f"{first.started:%Y-%m-%d}"
    return f"since yesterday, {day}" if days == 1 else f"since {day}, {days} days"


def version_changes(before: Run, now: Run) -> dict[str, tuple[str, str]]:
    """Package -> its versions in both runs, where they differ; "-" where it was not installed."""
    both = [run.versions | {"harness": run.revision} for run in (before, now)]
    pairs = {n: (both[0].get(n, "-"), both[1].get(n, "-")) for n in sorted({*both[0], *both[1]})}
    return {n: pair for n, pair in pairs.items() if pair[0] != pair[1]}


def stale(past: Sequence[Run], limit: datetime.timedelta, at: datetime.datetime) -> str:
    """Why the last run is too long ago, or nothing."""
    if not past:
        return "no such run was ever kept here"
    ago = at - past[-1].started
    hours = ago.total_seconds() / 3600
    return f"the last run began {hours:.0f} h ago ({past[-1].started:%Y-%m-%d %H:%M} UTC)" if ago > limit else ""


def _compared(run: Run, finding: Seen) -> bool:
    return any(n for (i, f, _), n in run.compared.items() if (i, f) == (finding.implementation, finding.family))


def _missing(run: Run, past: Sequence[Run], green: Run | None) -> Iterable[Missing]:
    """Cases beside the median of other nights; of nights whose time was over, as shares of their families' cases. What the
    last green night compared is named at 0, if tonight did all that it had planned."""
    stopped = {f.implementation for f in run.findings if f.known is None and f.verdict in STOPPED}
    whole = [r for r in past if r.whole] if run.whole else []
    for k in sorted({k for r in past for k in r.compared if k[0] not in stopped}):
        cases, of = run.compared.get(k, 0), 0 if whole else _cases(run, k)
        usual = statistics.median(
            r.compared.get(k, 0) * (of / max(_cases(r, k), 1) if of else 1) for r in whole or past
        )
        gone = not cases and run.whole and green is not None and green.compared.get(k, 0) > 0
        if gone or cases + CHANCE * math.sqrt(usual) < SHARE * usual:
            yield Missing(*k, cases=cases, usual=usual)


def _cases(run: Run, key: tuple[str, str, str]) -> int:
    """Cases of a family on a device: those of the implementation that had the most."""
    return max((n for k, n in run.compared.items() if k[1:] == key[1:]), default=0)
