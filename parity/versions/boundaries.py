"""The boundary of each history record, found by bisecting between its outermost releases: a record's own proof.

Records share releases, so each release is asked once for all records that want it, in one process, and again only
where a pair is confirmed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.version import Version

from parity.versions.bisect import Find, Measurement
from parity.versions.checks import Row
from parity.versions.client import cache_folder
from parity.versions.environment import Environment
from parity.versions.history import MISSED, RECALLED, UNUSABLE, Record, distinct
from parity.versions.probe import rows
from parity.versions.search import search


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


class Shared:
    """Rows of all records by environment; the n-th time that a record asks one, it gets rows of the n-th process."""

    def __init__(self, records: Sequence[Record]) -> None:
        self.records = records
        self._found: dict[str, list[list[Row]]] = {}
        self._asked: dict[tuple[str, str], int] = {}

    def check(self, record: Record) -> Callable[[Environment], Measurement]:
        """The record's check, over the shared rows."""

        def measure(made: Environment) -> Measurement:
            number = self._asked.get((record.id, made.name), 0)
            self._asked[record.id, made.name] = number + 1
            found = self._found.setdefault(made.name, [])
            while len(found) <= number:
                own = [r for r in self.records if r.package == record.package]
                found.append(rows(made, *distinct([r.check for r in own])))
            return record.check.judged(found[number])

        return measure


def boundaries(records: Sequence[Record], say: Callable[[str], None]) -> list[Boundary]:
    """Bisects every change that the records claim; killed, it goes on where it stopped."""
    shared, out, states = Shared(records), [], []
    for record in records:
        for asked in ends(record):
            states.append(_state(record, asked))
            report = search(
                record.package,
                good=asked.good,
                bad=asked.bad,
                check=shared.check(record),
                about=record.id,
                find=asked.find,
                state=states[-1],
                alone=False,
                confirm=1,
                say=say,
            )
            found = report.found
            count = len({version for version, _ in found.measured})
            out.append(Boundary(record, asked, found.outcome, found.low, found.high, count))
            say(f"{record.id}: {_told(out[-1])}")
    for state in states:
        state.unlink(missing_ok=True)
    return out


def _state(record: Record, asked: Ends) -> Path:
    question = f"{record.id} {record.check.case.id} {record.check.about} {asked}"
    return cache_folder("bisect") / f"history-{hashlib.sha256(question.encode()).hexdigest()[:12]}.json"


def _told(one: Boundary) -> str:
    if one.outcome != "found":
        return one.outcome
    return f"{'became right' if one.ends.find == 'fixed' else 'broke'} in {one.record.package} {one.high}"


def table(found: Sequence[Boundary]) -> str:
    """Markdown: a line a change."""
    lines = ["| record | searched | releases measured | last before | first after | recorded between | as recorded |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for one in found:
        asked = one.ends
        cells = [one.record.id, f"{one.record.package} {asked.older}..{asked.newer}, {asked.find}", str(one.measured)]
        cells += [one.low, one.high] if one.outcome == "found" else [one.outcome, ""]
        cells += [f"{asked.last_before} and {asked.first_after}", "yes" if one.as_recorded else "NO"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", f"{sum(one.as_recorded for one in found)} of {len(found)} boundaries as recorded"])


def exit_code(found: Sequence[Boundary]) -> int:
    """3 when an end could not be judged, 1 when a boundary is not as recorded, else 0."""
    if not found or any(one.outcome == "unjudged" for one in found):
        return UNUSABLE
    return RECALLED if all(one.as_recorded for one in found) else MISSED
