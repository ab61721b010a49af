"""Past runs, kept: one JSON file a run in `reports/history/`, so that a report can say since when.

A run is kept as sums: what was compared by implementation, family and device, and the findings, the new ones with the rows of
their smallest case. Other rows stay in results.ndjson, cases in `reports/findings/`.
"""

import collections
import datetime
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from parity.decoding import convert, decode, of_schema, save_json, text_of
from parity.errors import UsageError
from parity.results.report.findings import Finding, headroom
from parity.results.report.summary import Summary
from parity.results.report.wording import wrong
from parity.results.row import Row, finite

SCHEMA = 2
SHOWN = 100  # new findings whose rows are kept
CUT = "its time was over"


class CommandOutcome(msgspec.Struct, frozen=True):
    """One command and what came of it. `exit_code`: None where it was stopped before its end and had found nothing.
    `tail`: the last lines that it printed. `reached`: where its time was over before its end, how far it came."""

    name: str
    command: str
    exit_code: int | None
    seconds: float
    tail: str
    reached: str = ""

    @property
    def counts(self) -> int:
        """The exit code that the night has of it: 3 where it did not come to its end."""
        return 3 if self.exit_code is None else self.exit_code

    @property
    def whole(self) -> bool:
        """Whether it came to its end."""
        return self.exit_code is not None and not self.reached

    @property
    def verdict(self) -> str:
        """A few words for the page."""
        if self.exit_code is None:
            return f"stopped: {CUT}" + (f", {self.reached}" if self.reached else "")
        words = {0: "as expected", 1: "RED", 2: "wrong usage", 3: "not run: no environment", 4: "stale"}
        said = words.get(self.exit_code, f"failed ({self.exit_code})")
        return f"{said}, but {CUT}: {self.reached}" if self.reached else said


class Seen(msgspec.Struct, frozen=True):
    """A finding as one run had it; `key` is the same in every run that has it again, whatever the case. `wrong`: whose
    fault it is. `headroom` is None where the failure has no finite size. `rows`: of its smallest case."""

    key: str
    implementation: str
    family: str
    verdict: str
    cls: str | None
    wrong: str
    quantities: list[str]
    known: str | None
    cases: int
    headroom: float | None
    message: str
    replay: str
    rows: list[Row] = []


class Run(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """A kept run; times are UTC; `counts`: implementation, family, device, cases compared. `ended`: it came to its end
    in order; `whole`: it did all that it had planned, which one whose time is limited need not. `reasons`: why its exit
    code is not 0; `steps`: of a night, its other commands."""

    id: str
    started: datetime.datetime
    profile: str | None
    device: str | None
    seed: int | None = None
    revision: str = ""
    versions: dict[str, str] = {}
    exit_code: int = 0
    ended: bool = True
    whole: bool = True
    counts: list[tuple[str, str, str, int]] = []
    findings: list[Seen] = []
    reasons: list[str] = []
    steps: list[CommandOutcome] = []
    schema: int = SCHEMA

    @property
    def green(self) -> bool:
        """Whether nothing had to be done about it."""
        return self.exit_code == 0 and self.ended

    @cached_property
    def by_key(self) -> dict[str, Seen]:
        """Its findings by their keys."""
        return {f.key: f for f in self.findings}

    @cached_property
    def compared(self) -> dict[tuple[str, str, str], int]:
        """(implementation, family, device) -> cases."""
        out = collections.Counter[tuple[str, str, str]]()
        for implementation, family, device, cases in self.counts:
            out[implementation, family, device] += cases
        return out


def of(
    summary: Summary,
    exit_code: int,
    reasons: Sequence[str] = (),
    ended: bool = True,
    steps: Iterable[CommandOutcome] = (),
) -> Run:
    about, new = summary.header, [f for found in summary.findings for f in found.each]
    started = datetime.datetime.fromisoformat(about.started or datetime.datetime.now(datetime.UTC).isoformat())
    return Run(
        id=summary.run,
        started=started.astimezone(datetime.UTC),
        profile=about.profile,
        device=about.device,
        seed=about.seed,
        revision=about.git or "",
        versions=about.versions,
        exit_code=exit_code,
        ended=ended and summary.ended,
        whole=not summary.incomplete,
        counts=[(x.implementation, x.family, x.device, x.counts["compared"]) for x in summary.lines],
        findings=[_seen(f, n < min(SHOWN, len(new))) for n, f in enumerate((*new, *summary.known))],
        reasons=list(reasons),
        steps=list(steps),
    )


def keep(run: Run, folder: Path) -> None:
    """Write a run's file: complete or not at all, and once: a run that is kept again replaces its file."""
    save_json(folder / f"{run.started:%Y%m%dT%H%M%S}-{run.id}.json", run)


def runs(folder: Path, say: Callable[[str], object] = print) -> list[Run]:
    """Every kept run, the oldest first; a file that is none, or one of another parity, is left out and told to `say`."""
    found = []
    for path in sorted(folder.glob("[!.]*.json")):
        try:
            data = decode(Any, text_of(path, "kept run"), str(path))
            of_schema(data, SCHEMA, str(path), "a kept run")
            found.append(convert(Run, data, str(path)))
        except UsageError as error:
            say(f"left out, cannot be read: {error}")
    return sorted(found, key=lambda run: run.started)


def _seen(f: Finding, with_rows: bool) -> Seen:
    cls = "logic" if "logic" in f.classes else next(iter(f.classes), None)
    told = cls, wrong(f.lead), list(f.roots), f.known, f.cases, finite(headroom(f.worst)), f.lead.message, f.lead.replay
    return Seen(f.key, f.implementation, f.family, f.verdict, *told, rows=list(f.rows) if with_rows else [])
