"""The exact release of each change in the history records, found by bisecting between their outermost releases.

All records are searched in step: of the releases that any search needs next, the one that most of them need is asked,
for all of those in one process. Every answer is on disk before the next one is sought.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from packaging.version import Version

from parity.decoding import save_json, saved
from parity.results.report import measured
from parity.versions.commands.history import MISSED, RECALLED, UNUSABLE, Record, distinct
from parity.versions.commands.probe import CPU_LIMIT, look
from parity.versions.env.client import EnvironmentUnusable, cache_folder
from parity.versions.env.environment import Environment
from parity.versions.env.releases import releases
from parity.versions.search.bisect import Find, Measurement, SearchResult, bisect


@dataclass(frozen=True)
class Ends:
    """Between which releases a record is searched, and between which two the boundary must lie."""

    find: Find
    older: str
    newer: str
    last_before: str
    first_after: str

    @property
    def good(self) -> str:
        """The end that is right."""
        return self.newer if self.find == "fixed" else self.older

    @property
    def bad(self) -> str:
        """The end that is wrong."""
        return self.older if self.find == "fixed" else self.newer


@dataclass(frozen=True)
class Boundary:
    """What the search found: `low` and `high` are neighbours but for releases that could not be judged."""

    record: Record
    ends: Ends
    outcome: str
    low: str
    high: str
    measured: int

    @property
    def as_recorded(self) -> bool:
        """Whether the change lies between the recorded sides."""
        inside = Version(self.ends.last_before) <= Version(self.low) and Version(self.high) <= Version(
            self.ends.first_after
        )
        return self.outcome == "found" and inside


def ends(record: Record) -> list[Ends]:
    """The changes that a record claims: when it broke, if an older release was good, and when it became right.

    Releases that want a partner of their own are left out: the search moves partners by date.
    """
    bad, good = (sorted({_version(s) for s in side if len(s) == 1}, key=Version) for side in (record.bad, record.good))
    if not bad:
        return []
    older, newer = [v for v in good if Version(v) < Version(bad[0])], [v for v in good if Version(v) > Version(bad[-1])]
    out = []
    if older:
        out.append(Ends("broken", older[0], bad[-1], older[-1], bad[0]))
    if newer:
        out.append(Ends("fixed", bad[0], newer[-1], bad[-1], newer[0]))
    return out


def _version(specs: Sequence[str]) -> str:
    return specs[0].partition("==")[2]


@dataclass(frozen=True)
class Question:
    """A release that a search needs; `repeat` counts from 0, a pair is asked again in a process of its own."""

    package: str
    version: str
    repeat: int


class _Wanted(Exception):
    """Stops a search at the first release that it needs and nobody has asked yet."""


class Search:
    """One record's search over what is known so far; `known` is kept in `path`, and resumed from it."""

    def __init__(self, record: Record, asked: Ends, path: Path) -> None:
        self.record, self.ends, self.path = record, asked, path
        self.candidates: list[str] = []
        self.known: dict[str, Measurement] = saved(dict[str, Measurement], path) or {}

    def step(self) -> SearchResult[str] | Question:
        """The end of the search, or what it needs next. The search is deterministic, so it is run from its beginning."""
        missing: list[Question] = []

        def measure(version: str, repeat: int) -> Measurement:
            if (found := self.known.get(f"{version} {repeat}")) is None:
                missing.append(Question(self.record.package, version, repeat))
                raise _Wanted
            return found

        try:
            return bisect(self.candidates, measure, find=self.ends.find, confirm=1)
        except _Wanted:
            return missing[0]

    def tell(self, asked: Question, answer: Measurement, *, keep: bool) -> None:
        """Adds an answer; what could not be run is not kept: a resumed search should see for itself."""
        self.known[f"{asked.version} {asked.repeat}"] = answer
        if keep:
            save_json(self.path, {key: one for key, one in self.known.items() if one.versions})


def boundaries(records: Sequence[Record], say: Callable[[str], None], device: str = "cpu") -> list[Boundary]:
    """Bisects every change that the records claim; killed, it goes on where it stopped."""
    records = [replace(record, check=replace(record.check, device=device)) for record in records]
    searches = [Search(record, one, _state(record, one)) for record in records for one in ends(record)]
    for package in {one.record.package for one in searches}:
        of_package = [one for one in searches if one.record.package == package]
        widest = [
            f(v, key=Version)
            for f, v in ((min, [o.ends.older for o in of_package]), (max, [o.ends.newer for o in of_package]))
        ]
        listed = [one.version for one in releases(package, *widest)]
        for one in of_package:
            older, newer = Version(one.ends.older), Version(one.ends.newer)
            inside = {version for version in listed if older <= Version(version) <= newer}
            # An end was named by its version, which also finds a yanked release; the list leaves those out.
            one.candidates = sorted(inside | {one.ends.older, one.ends.newer}, key=Version)
    found = advance(searches, answers, say)
    for one in searches:
        one.path.unlink(missing_ok=True)
    return found


Ask = Callable[[Question, Sequence[Record]], "list[Measurement]"]


def advance(searches: Sequence[Search], ask: Ask, say: Callable[[str], None]) -> list[Boundary]:
    """Runs all searches to their ends; `ask` answers a question for several records, in their order."""
    done: dict[int, Boundary] = {}
    while True:
        wanted: dict[Question, list[Search]] = {}
        for number, one in enumerate(searches):
            if number in done:
                continue
            step = one.step()
            if isinstance(step, Question):
                wanted.setdefault(step, []).append(one)
                continue
            count = len({version for version, _ in step.measured})
            done[number] = Boundary(one.record, one.ends, step.outcome, step.low, step.high, count)
            say(f"{one.record.id}: {_told(done[number])}")
        if not wanted:
            return [done[number] for number in range(len(searches))]
        asked = max(wanted, key=lambda question: len(wanted[question]))
        waiting = sum(map(len, wanted.values()))
        again = " again" if asked.repeat else ""
        say(
            f"{asked.package} {asked.version}{again}: {len(wanted[asked])} of {waiting} searches that are not at their end"
        )
        for one, answer in zip(wanted[asked], ask(asked, [one.record for one in wanted[asked]]), strict=True):
            one.tell(asked, answer, keep=bool(answer.versions))
            say(f"  {one.record.id}: {answer.verdict}{f': {answer.message}' if answer.message else ''}")


def answers(asked: Question, records: Sequence[Record]) -> list[Measurement]:
    """What the records' checks answer on a release, from one process; each from its own where that one ends early."""
    try:
        made = Environment.of([f"{asked.package}=={asked.version}"])
        cases, implementations = distinct([record.check for record in records])
        exactly: dict[str, list[str]] = {}
        for record in records:
            exactly.setdefault(record.check.case.id, []).append(record.check.implementation)
        device = records[0].check.device
        limit = CPU_LIMIT * len(cases)
        rows = look(made, cases, implementations, exactly=exactly, cpu_limit=limit, device=device).rows
    except EnvironmentUnusable as error:
        if len(records) == 1:
            return [Measurement("unsupported", message=str(error))]
        return [answers(asked, [record])[0] for record in records]
    return [replace(record.check.judged(rows), versions=made.versions) for record in records]


def _state(record: Record, asked: Ends) -> Path:
    question = f"{record.id} {record.check.case.id} {record.check.about} {asked}"
    return cache_folder("bisect") / f"record-{hashlib.sha256(question.encode()).hexdigest()[:12]}.json"


def _told(one: Boundary) -> str:
    if one.outcome != "found":
        return one.outcome
    return f"{'became right' if one.ends.find == 'fixed' else 'broke'} in {one.record.package} {one.high}"


def table(found: Sequence[Boundary]) -> str:
    """Markdown: a line a change."""
    rows = []
    for one in found:
        asked = one.ends
        cells = [one.record.id, f"{one.record.package} {asked.older}..{asked.newer}, {asked.find}", str(one.measured)]
        cells += [one.low, one.high] if one.outcome == "found" else [one.outcome, ""]
        cells += [f"{asked.last_before} and {asked.first_after}", "yes" if one.as_recorded else "NO"]
        rows.append(cells)
    heads = ["record", "searched", "releases measured", "last before", "first after", "recorded between", "as recorded"]
    lines = measured.table(heads, rows)
    return "\n".join([*lines, "", f"{sum(one.as_recorded for one in found)} of {len(found)} boundaries as recorded"])


def exit_code(found: Sequence[Boundary]) -> int:
    """3 when an end could not be judged, 1 when a boundary is not as recorded, else 0."""
    if not found or any(one.outcome == "unjudged" for one in found):
        return UNUSABLE
    return RECALLED if all(one.as_recorded for one in found) else MISSED
