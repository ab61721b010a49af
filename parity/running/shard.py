"""One shard of a run: draw cases of a family, run each, minimise what is new. Happens inside a worker process."""

from __future__ import annotations

import dataclasses
import functools
import json
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, NoReturn

from hypothesis.errors import Flaky
from msgspec.structs import replace

from parity import world
from parity.case.case import Case
from parity.case.drawing import batch, cases
from parity.case.profiles import SHARDS, Profile
from parity.implementations.implementation import Implementation
from parity.registry import facts, loss_family, run_case
from parity.results.ledger import Ledger, stale
from parity.results.row import Row
from parity.running.events import At, Checked, Event, Judged, Shrinking, Started, Stopped


@dataclasses.dataclass(frozen=True)
class Shard:
    """A part of a run: `count` drawn cases of a family, or the frozen cases when `count` is 0.

    `resume` cases at the start were done before the worker died; `skip` names (case, implementation) pairs that killed it.
    """

    family: str
    index: int
    count: int
    seed: int
    parts: int = SHARDS
    resume: int = 0
    skip: tuple[tuple[str, str], ...] = ()


@dataclasses.dataclass
class Session:
    """What a worker needs for its shards."""

    implementations: Sequence[Implementation]
    profile_name: str
    profile: Profile
    dtypes: Sequence[str]
    device: str
    ledger: Ledger
    findings_dir: Path
    emit: Callable[[Event], None]
    signatures: set[tuple[str, str, str | None]] = dataclasses.field(default_factory=set)
    deadline: float | None = None
    minimised: int = 0
    minimising: float = 0.0

    def frozen(self, shard: Shard, found: Sequence[tuple[str, Case, Mapping[str, Any]]]) -> None:
        """Run frozen cases, every implementation of their family on each, or those that the file names and a user's own."""
        for number, (name, case, extra) in enumerate(found):
            if number < shard.resume or case.family != shard.family:
                continue
            self.emit(At(number))
            only = extra.get("implementations")
            chosen = [i for i in self._of(case) if only is None or i.id in only or i.is_function]
            thorough = not extra.get("fast", False)
            rows = []
            for row in self._run(case, chosen, shard, thorough):
                rows.append(row)
                self.emit(Judged(replace(row, frozen=name)))
            for entry, own in self.ledger.frozen():
                if own == case and entry.in_force() and (not entry.devices or self.device in entry.devices):
                    verdict = stale(entry, rows)
                    if verdict:  # it must agree twice before the ledger is called stale
                        concerned = [i for i in chosen if entry.covers_implementation(i.id)]
                        verdict = stale(entry, list(self._run(case, concerned, shard, thorough)))
                    self.emit(Checked(entry.id, verdict))

    def late(self, shard: Shard, number: int) -> bool:
        """Whether the time of the run is over; the supervisor is told where the shard stopped."""
        if self.deadline is None or time.time() < self.deadline:
            return False
        self.emit(Stopped(shard.family, number, shard.count))
        return True

    def checks(self, shard: Shard) -> None:
        """Run a trainer's checks: every case of the profile whose number falls to this shard. Nothing is minimised."""
        from parity.trainers.catalogue import cases as trainer_cases

        for number, case in enumerate(
            trainer_cases(shard.family, self.profile_name, shard.seed)[shard.index :: shard.parts]
        ):
            if number < shard.resume:
                continue
            if self.late(shard, number):
                break
            self.emit(At(number))
            for row in self._run(case, self._of(case), shard, thorough=False):
                self.emit(Judged(row))

    def drawn(self, shard: Shard) -> None:
        """Draw and run the shard's cases; a new finding interrupts its batch and is minimised, then the next batch goes on."""
        strategy = cases(loss_family(shard.family), self.dtypes, self.profile_name)
        state = _Stream()
        number = 0
        while state.number < shard.count and number < 10 * shard.count:
            if self.late(shard, state.number):
                break
            state.finding = state.smallest = None

            def visit(case: Case) -> None:
                self._visit(state, case, shard)

            try:
                batch(strategy, f"{shard.seed}/{shard.family}/{shard.index}/{number}", visit)
            except Finding as smallest:
                self._freeze(smallest)
                self.minimising += time.monotonic() - state.found
            except Flaky:  # it shows no more when asked again: its row stands as drawn
                self.minimising += time.monotonic() - state.found
            number += 1

    def _visit(self, state: _Stream, case: Case, shard: Shard) -> None:
        """One case of a batch: run it if it is a new one, or a step of minimising the finding of this batch."""
        if state.finding is not None:
            self._shrink_step(state, case, shard)
            return
        if case.id in state.seen or state.number >= shard.count:
            return
        state.seen.add(case.id)
        number, state.number = state.number, state.number + 1
        if number < shard.resume:
            return
        self.emit(At(number))
        finding = self._one(case, shard)
        for again in second_pass(case, self.device, not self.profile.derandomised):
            self._one(again, shard, minimise=False)
        if finding is not None:
            # Hypothesis asks for the case once more before it believes it: that must show it however late it is.
            state.finding, state.smallest, state.found = finding, case, time.monotonic()
            left = self.profile.minimise_seconds - self.minimising
            state.deadline = state.found + min(self.profile.shrink_seconds, left)
            self.minimised += 1
            _report(finding)

    def _one(self, case: Case, shard: Shard, minimise: bool = True) -> Finding | None:
        """Run and emit one drawn case; the first new finding in it that is to be minimised, if any.

        A finding for which no time is left is marked: `minimised` is False in the row that shows it first.
        """
        chosen = [i for i in self._of(case) if selected(i, case, self.profile.cost, self.device)]
        thorough = functools.partial(repeated, case=case, one_in=self.profile.thorough)
        new: Finding | None = None
        within = self.minimised < self.profile.findings and self.minimising < self.profile.minimise_seconds
        for row in self._run(case, chosen, shard, thorough):
            signature = signature_of(row)
            if minimise and signature is not None and signature not in self.signatures and row.verdict != "timed-out":
                if not within:
                    row.minimised = False
                elif new is None:
                    new = Finding(case, row)
                self.signatures.add(signature)
            self.emit(Judged(row))
        return new

    def _shrink_step(self, state: _Stream, case: Case, shard: Shard) -> None:
        """Hypothesis asks whether a smaller case still shows the finding; past the deadline nothing does."""
        assert state.finding is not None
        if time.monotonic() > state.deadline and case != state.smallest:
            return
        wanted = state.finding.row
        chosen = [i for i in self._of(case) if i.id == wanted.implementation]
        self.emit(Shrinking(case.id))
        for row in self._run(case, chosen, shard, thorough=wanted.gate in ("protocol", "relation")):
            if signature_of(row) == signature_of(wanted):
                state.smallest = case
                _report(Finding(case, row))

    def _freeze(self, finding: Finding) -> None:
        self.findings_dir.mkdir(parents=True, exist_ok=True)
        row = finding.row
        path = self.findings_dir / f"{finding.case.id}.json"
        path.write_text(
            json.dumps({"case": finding.case.to_json(), "implementation": row.implementation}, indent=1) + "\n"
        )
        line = f"parity replay {_shown(path)} --implementation {row.implementation}"
        chosen = [i for i in self._of(finding.case) if i.id == row.implementation or i.role == "reference"]
        for again in self._run(finding.case, chosen, None, thorough=True):
            if again.implementation == row.implementation:
                self.emit(Judged(replace(again, minimised=True, replay=line)))

    def _of(self, case: Case) -> list[Implementation]:
        return [i for i in self.implementations if i.family == case.family]

    def _run(
        self,
        case: Case,
        chosen: Sequence[Implementation],
        shard: Shard | None,
        thorough: bool | Callable[[Implementation], bool],
    ) -> Iterator[Row]:
        """Rows of a case, the known ones marked; pairs that killed a worker before are left out."""
        skip = {i for c, i in shard.skip if c == case.id} if shard else set()
        last = ""
        usable = [i for i in chosen if i.id not in skip]
        extends = {i.id: i.extends for i in usable}
        agreed: set[tuple[str, str | None]] = set()
        for row in run_case(
            case, usable, self.device, thorough, lambda i: self.emit(Started(case.id, i.id, case.to_json()))
        ):
            if row.failing:
                row.known = self._known(row, case, extends[row.implementation], agreed)
            else:
                agreed.add((row.implementation, row.quantity))
            last = row.implementation
            yield row
        if world.broken():
            raise Retired(case.id, last)

    def _known(self, row: Row, case: Case, extended: str, agreed: Set[tuple[str, str | None]]) -> str | None:
        """The ledger's entry of a failing row; a trainer inherits those of the class it extends, unless that agrees here."""
        found = self.ledger.match(row, facts(case))
        if found or not extended or (extended, row.quantity) in agreed:
            return found
        return self.ledger.match(replace(row, implementation=extended), facts(case))


@dataclasses.dataclass
class _Stream:
    number: int = 0
    seen: set[str] = dataclasses.field(default_factory=set)
    finding: Finding | None = None
    smallest: Case | None = None
    found: float = 0.0
    deadline: float = 0.0


class Retired(BaseException):
    """(case, implementation) after which this process must not judge anybody: `parity.world.broken`.

    No Exception: Hypothesis would minimise it.
    """


class Finding(Exception):
    """A new disagreement, raised so that Hypothesis minimises the case that shows it."""

    def __init__(self, case: Case, row: Row):
        super().__init__(f"{row.implementation} {row.quantity}")
        self.case, self.row = case, row


def _report(finding: Finding) -> NoReturn:
    """The only module that raises: Hypothesis tells findings apart by where they are raised."""
    raise finding


SECOND_PASS = 4
"""One in so many plain float32 cases is run with tf32 products too, where there are such."""


VOCABULARIES = (128_256, 151_936, 262_144)
"""Llama 3, Qwen 2.5 and Gemma 3."""
REAL, TOKENS, HIDDEN = 20, 8, 4
"""One in so many cases of at most TOKENS tokens has such a vocabulary too, at most HIDDEN wide: half a GB of replicas."""


def second_pass(case: Case, device: str, long: bool = False) -> Iterator[Case]:
    """On CUDA a case once more: a share of the plain float32 ones under `torch.set_float32_matmul_precision("high")`, as
    trainers set it, and in `long` profiles a share of the small ones with a real vocabulary.

    Judged with tf32 recipes. A case of its own in results and replays; a finding of it is not minimised.
    """
    fam = loss_family(case.family)
    number = zlib.crc32(f"vocabulary/{case.id}".encode())
    if device == "cuda" and long and "V" in fam.settings and number % REAL == 0:
        s = fam.full_settings(case)
        if case.tensors is None and s.B * s.T <= TOKENS and getattr(s, "context", "plain") != "compile":
            real = {"V": VOCABULARIES[number // REAL % len(VOCABULARIES)], "H": min(s.H, HIDDEN)}
            yield dataclasses.replace(case, settings=dict(case.settings) | real)
    known = "context" in loss_family(case.family).settings
    plain = known and case.dtype == "fp32" and case.settings.get("context", "plain") == "plain"
    if device == "cuda" and plain and zlib.crc32(case.id.encode()) % SECOND_PASS == 0:
        yield dataclasses.replace(case, settings=dict(case.settings) | {"context": "tf32"})


def signature_of(row: Row) -> tuple[str, str, str | None] | None:
    """What makes two failing rows the same finding while shrinking; None for a row that is not a new failure."""
    if not row.new:
        return None
    return row.implementation, row.subject, row.cls


def selected(implementation: Implementation, case: Case, cost: int, device: str) -> bool:
    """Whether a drawn case is among those that a costly implementation gets: by the case's id, the same on every run."""
    every = implementation.every * cost if implementation.every > 1 else 1
    if implementation.interpreted:
        known = loss_family(case.family)
        rows, length = known.sizes(known.full_settings(case))
        every = every + every * rows * (1 + length // 256) // 16 if device == "cpu" else 1  # every block costs
    return zlib.crc32(f"{implementation.id}/{case.id}".encode()) % every == 0


def repeated(implementation: Implementation, case: Case, one_in: int) -> bool:
    """Whether an implementation gets the repeated calls on a drawn case; costly ones sixteen times as rarely."""
    one_in = one_in * 16 if implementation.every > 1 else one_in
    return zlib.crc32(f"thorough/{implementation.id}/{case.id}".encode()) % one_in == 0


def _shown(path: Path) -> str:
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
