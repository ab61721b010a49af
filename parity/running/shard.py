"""One shard of a run: run its cases, or look at a finding again and minimise it. Happens inside a worker process."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace

from parity.case.case import Case, Frozen
from parity.case.drawing import cases, draws
from parity.case.profiles import Profile, cases_drawn, dealt, streams
from parity.compare.result_rows import empty_row
from parity.implementations.implementation import Implementation
from parity.judge.escalation import CERTAIN, CONFIRMATION, NEAR, REPLICAS
from parity.judge.gates import stands_for
from parity.protocol import process_state
from parity.registry import facts, is_trainer, loss_family, run_case
from parity.results import recorded
from parity.results.ledger import Ledger, stale
from parity.results.recorded import Recorded
from parity.results.row import DECLINED, STOPPED, Row, failures
from parity.running.plan import At, Confirmed, Event, Judged, Shard, Signature, Sought, Started, signature_of
from parity.sampling.capabilities import Nearest, besides, left_out, refusal, repeated, second_pass, selected, smaller
from parity.trainers import catalogue

STREAMS = 4  # streams of a family whose cases are moved to what an implementation takes
MORE = 120  # draws more from which a small run takes, for each function of a user, the settings that its own leave out
AGAIN = 3  # cases of a new finding, which no recipe explains, that are judged with as many replicas as it takes
KEPT = 4 * STREAMS  # streams of drawn cases that a worker keeps, so that it draws each case once


@dataclasses.dataclass
class Session:
    """What a worker needs for its shards. `measuring`: whatever frozen cases gave when they were measured."""

    implementations: Sequence[Implementation]
    profile_name: str
    profile: Profile
    dtypes: Sequence[str]
    device: str
    ledger: Ledger
    emit: Callable[[Event], None]
    deadline: float | None = None
    frozen: Mapping[str, Frozen] = dataclasses.field(default_factory=dict)
    measuring: bool = False
    shown: collections.Counter[Signature] = dataclasses.field(default_factory=collections.Counter)
    streams: dict[tuple[str, int], tuple[Iterator[Case], list[Case]]] = dataclasses.field(default_factory=dict)

    def run(self, shard: Shard) -> int:
        """How many of its cases the shard came to before the time of the run was over; frozen ones are run in any case."""
        self.shown.clear()
        if shard.kind == "finding":
            self.finding(shard)
            return 1
        if shard.kind == "besides":
            return int(self._besides(shard))
        for number, case in enumerate(self._cases(shard)):
            if number < shard.resume:
                continue
            if shard.kind != "frozen" and self.deadline is not None and time.time() > self.deadline:
                return number
            self.emit(At(number))
            if shard.kind == "frozen":
                self._frozen(case[0], case[1], shard)
            elif shard.kind == "drawn":
                self._drawn(case, shard)
            else:
                for row in self._run(case, self._of(case), shard, thorough=False):
                    self.emit(Judged(row))
        return shard.count

    def _cases(self, shard: Shard) -> Sequence[Any]:
        every: Sequence[Any]
        end = shard.start + shard.count
        if shard.kind == "drawn":
            every = self._stream(shard.family, shard.index, shard.of, shard.seed, end)
        elif shard.kind == "frozen":
            every = [one for one in self.frozen.items() if one[1].case.family == shard.family]
        else:
            every = catalogue.cases(shard.family, self.profile_name, shard.seed, asked=True, own=shard.own)
        return every[shard.start : end]

    def _stream(self, family: str, index: int, of: int, seed: int, count: int) -> list[Case]:
        """The first cases of a stream, each drawn when it is first asked for."""
        key = family, index
        if key not in self.streams:
            strategy = cases(loss_family(family), self.dtypes, self.profile_name)
            self.streams[key] = draws(strategy, f"{seed}/{family}/{index}", of), []
            for old in list(self.streams)[:-KEPT]:
                del self.streams[old]
        source, drawn = self.streams[key]
        drawn += itertools.islice(source, max(0, count - len(drawn)))
        return drawn[:count]

    def _frozen(self, name: str, of_file: Frozen, shard: Shard) -> None:
        """A frozen case, every implementation of its family on it, or those that the file names and a user's own."""
        case, only, thorough = of_file.case, of_file.implementations, not of_file.fast
        chosen = [i for i in self._of(case) if only is None or i.id in only or i.is_function]
        rows = list(self._judged(case, chosen, shard, thorough and self.profile.frozen_whole))
        for entry in self.ledger.entries:
            if Path(entry.case).name == name and stale(entry, rows, self.device):
                torch.compiler.reset()  # it must agree twice, and as a fresh process would compile it
                concerned = {i.id for i in chosen if entry.covers_implementation(i.id)}
                again = list(self._run(case, [i for i in chosen if i.id in concerned], shard, thorough))
                if not stale(entry, again, self.device):
                    rows = [row for row in rows if row.implementation not in concerned] + again
        for row in rows:
            self.emit(Judged(replace(row, frozen=name)))

    def _judged(
        self,
        case: Case,
        chosen: Sequence[Implementation],
        shard: Shard,
        thorough: bool | Callable[[Implementation], bool] = False,
    ) -> Iterator[Row]:
        """Rows of a case, each as soon as it stands. `CONFIRMATION` replicas do where a loss clearly shows what is known; where
        `AGAIN` cases of the shard have shown a finding of one of them, `REPLICAS`, if it is `CERTAIN` that it shows again. What
        fails otherwise is judged once more, beside its references, with as many as it takes; not what fails in one call of two,
        which may need a hundred calls to show again."""
        if self.measuring or is_trainer(case.family):
            yield from self._run(case, chosen, shard, thorough)
            return
        held, told = list[Row](), set[tuple[str, str]]()
        shown = {sign for sign, count in self.shown.items() if count >= AGAIN}
        repeated = {i.id for i in chosen} & {sign[0] for sign in shown}
        most, clear = (REPLICAS, CERTAIN) if repeated else (CONFIRMATION, NEAR)
        try:
            for row in self._run(case, chosen, shard, thorough, most):
                there = row.known or signature_of(row) in shown
                clearly = there and (row.headroom is None or row.headroom >= clear)
                if row.failing and row.verdict != "nondeterministic" and not clearly:
                    held.append(row)
                else:
                    told.add((row.implementation, row.subject))
                    yield row
        except Retired:  # a fresh process goes on behind this case
            yield from held
            raise
        again = {row.implementation for row in held}
        if again:
            beside = again | {i.extends for i in chosen if i.id in again}
            chosen = [i for i in chosen if i.id in beside or i.role == "reference"]
            crashed = {row.implementation: row for row in held if row.verdict == "crashed"}
            for row in self._run(case, chosen, shard, thorough):
                if row.verdict in STOPPED:
                    crashed.pop(row.implementation, None)
                if row.implementation in again and (row.implementation, row.subject) not in told:
                    self.shown[signature_of(row)] += row.new and not row.recipes and row.blame != "both"
                    yield row
            yield from (
                replace(row, message=f"{row.message}; the same call again does not") for row in crashed.values()
            )

    def _drawn(self, case: Case, shard: Shard) -> None:
        for one in (case, *second_pass(case, self.device, not self.profile.derandomised)):
            if chosen := self._given(one):
                for row in self._judged(one, chosen, shard, functools.partial(self._repeated, one)):
                    self.emit(Judged(row))

    def _repeated(self, case: Case, own: Implementation) -> bool:
        return repeated(own, case, self.profile.thorough, self.device)

    def _given(self, case: Case) -> list[Implementation]:
        """Who gets a drawn case: none where candidates are asked for and none of them takes it."""
        chosen = [i for i in self._of(case) if selected(i, case, self.profile.cost, self.device)]
        takes = any(i.role != "reference" and refusal(i, case, self.device) is None for i in chosen)
        alone = all(i.role == "reference" for i in self._of(case))  # nothing else is asked for
        return chosen if takes or alone else []

    def _besides(self, shard: Shard) -> bool:
        """What implementations get besides their draws, a case of several of them once; whether the time was enough. A user's
        function of few parameters takes few draws, so it gets repeated calls here too."""
        self.emit(At(0))
        # a user's trainer is of two families, by one id
        of_family = (i for i in self.implementations if i.family == shard.family)
        chosen = [i for i in of_family if i.id in shard.implementations]
        if not chosen:  # left out: they have cost too many workers
            return True
        counts = streams(cases_drawn(shard.family, self.profile_name), self.device)
        streamed = [self._stream(shard.family, n, of, shard.seed, of) for n, of in enumerate(counts[:STREAMS])]
        drawn = [case for stream in streamed for case in stream]
        users = any(i.is_function for i in self.implementations if i.family == shard.family)
        every_pair = self.profile.cost == 1
        few = users and not every_pair  # a user's function leaves out no setting
        more = self._stream(shard.family, len(counts), MORE, shard.seed, MORE) if few else []
        ends = dealt(self.profile_name, counts, users)
        given = {case.id for stream, end in zip(streamed, ends, strict=False) for case in stream[:end]}

        def thorough(case: Case, own: Implementation) -> bool:
            return own.is_function and self._repeated(case, own)

        def gets(own: Implementation, case: Case) -> bool:  # a reference what a candidate takes too
            if case.id not in given or not selected(own, case, self.profile.cost, self.device):
                return False
            return own.role != "reference" or own in self._given(case)

        wanted: list[tuple[Implementation, Case]] = []
        owed, further = collections.Counter[str](), dict[str, Iterator[Case]]()  # by implementation
        near: Nearest = {}
        for own in chosen:
            of_own = functools.partial(gets, own)
            least = self.profile.least_own if own.is_function else self.profile.least
            pool = drawn + [case for case in more if own.is_function and case.id not in given]
            first, owed[own.id], further[own.id] = besides(own, pool, of_own, least, self.device, every_pair, near)
            wanted += [(own, case) for case in first]
        while wanted:
            together: dict[str, tuple[Case, list[Implementation]]] = {}
            for own, case in wanted:
                together.setdefault(case.id, (case, []))[1].append(own)
            wanted = []
            for case, owns in together.values():
                if self.deadline is not None and time.time() > self.deadline:
                    return False
                references = [r for r in self._of(case) if r.role == "reference" and r not in owns]
                came = set[str]()
                for row in self._judged(case, [*references, *owns], shard, functools.partial(thorough, case)):
                    came |= set() if row.verdict in DECLINED else {row.implementation}
                    self.emit(Judged(row))
                owed.subtract(came & owed.keys())
            for own in chosen:
                wanted += [(own, case) for case in itertools.islice(further[own.id], max(0, owed[own.id]))]
        return True

    def finding(self, shard: Shard) -> None:
        """Look for a new finding once more where that is asked for, then minimise the case that showed it first."""
        sought = shard.sought
        assert sought is not None
        found = [Case.from_json(data) for data in sought.cases]
        if sought.fresh:
            shown: set[tuple[str, str | None]] = set()
            for case in found:
                if not shown.issuperset(sought.subjects):
                    shown |= {(row.subject, row.cls) for row in self._again(case, sought, True) if row.new}
            self.emit(Confirmed([subject for subject in sought.subjects if subject in shown]))
            if sought.subjects[0] not in shown:
                return
        if sought.seconds:
            self._minimise(found[0], sought)

    def _minimise(self, case: Case, sought: Sought) -> None:
        """Go to smaller cases that show all that this one shows as clearly, while there is time, and judge the last."""
        until, asked = time.monotonic() + sought.seconds, set[str]()

        def shown(one: Case) -> dict[str, float]:
            asked.add(one.id)
            failing = [row for row in self._again(one, sought, sought.gate in ("protocol", "relation")) if row.new]
            return failures(failing) if sought.signature in map(signature_of, failing) else {}

        whole = shown(case)
        if not whole:  # it shows no more when asked again: its row stands as drawn
            return
        left = smaller(case)
        while time.monotonic() < until and (one := next(left, None)) is not None:
            if one.id not in asked and stands_for(shown(one), whole):
                case, left = one, smaller(one)
        chosen = [i for i in self._of(case) if i.id == sought.implementation or i.role == "reference"]
        for row in self._run(case, chosen, None, thorough=True):
            if row.implementation == sought.implementation:
                self.emit(Judged(replace(row, minimised=True)))

    def _again(self, case: Case, sought: Sought, thorough: bool) -> list[Row]:
        chosen = [i for i in self._of(case) if i.id == sought.implementation]
        return list(self._run(case, chosen, None, thorough))

    def _of(self, case: Case) -> list[Implementation]:
        return [i for i in self.implementations if i.family == case.family]

    def _run(
        self,
        case: Case,
        chosen: Sequence[Implementation],
        shard: Shard | None,
        thorough: bool | Callable[[Implementation], bool],
        most: int | None = None,
    ) -> Iterator[Row]:
        """Rows of a case, the known ones marked; pairs that killed a worker before are left out, and some of a slow function
        where it is not judged once more."""
        skip = {i for c, i in shard.skip if c == case.id} if shard else set()
        for i in chosen if shard and most else ():
            if i.id not in skip and (message := left_out(i, case)):
                skip.add(i.id)
                yield empty_row(loss_family(case.family), case, i.id, self.device, message=message)
        usable = sorted((i for i in chosen if i.id not in skip), key=lambda i: bool(i.extends))
        extends = {i.id: i.extends for i in usable}
        agreed: set[tuple[str, str | None]] = set()

        def announce(one: Implementation) -> None:
            self.emit(Started(case.id, one.id, case.to_json()))

        def settled(row: Row) -> bool:
            return not self.measuring and self._known(row, case, extends[row.implementation], agreed)[0] is not None

        for row in run_case(case, usable, self.device, thorough, announce, most, settled):
            if row.failing:
                self._mark(row, case, extends[row.implementation], agreed)
            else:
                agreed.add((row.implementation, row.quantity))
            yield row
        if process_state.broken():
            raise Retired

    def _mark(self, row: Row, case: Case, extended: str, agreed: Set[tuple[str, str | None]]) -> None:
        """Says of a failing row whether it is known, and of a trainer's new finding what its model gets wrong alone."""
        row.known, why = self._known(row, case, extended, agreed)
        if row.new and is_trainer(case.family):
            alone = catalogue.of_model(case, lambda other, its: self.ledger.match(other, facts(its)))
            why = "; ".join(filter(None, [why, alone]))
        row.message = "; ".join(filter(None, [row.message, why]))

    def _known(
        self, row: Row, case: Case, extended: str, agreed: Set[tuple[str, str | None]]
    ) -> tuple[str | None, str]:
        """The ledger's entry of a failing row; a trainer inherits those of the class it extends, unless that agrees here. A
        known finding that is not what its frozen case gave when that was measured is a new one, and the text says so."""
        known = self.ledger.match(row, facts(case))
        if not known and extended and (extended, row.quantity) not in agreed:
            known = self.ledger.match(replace(row, implementation=extended), facts(case))
        entry = next((e for e in self.ledger.entries if e.id == known), None)
        if entry and (said := recorded.altered(row, entry, [one for _, one in self.recorded.get(case.id, ())])):
            before = f"{entry.id} is known ({self.ledger.line_of(entry.id)}), but in its frozen case it was not so"
            who = f" --implementation {row.implementation}" if ".py:" in row.implementation else ""
            measure = f"parity ledger measure {self.recorded[case.id][0][0]}{who}"
            remedy = f"it is another mistake, or a larger one; only if you know better: {measure}"
            return None, f"{before}: {said}; {remedy}"
        return known, ""

    @functools.cached_property
    def recorded(self) -> dict[str, list[tuple[str, Recorded]]]:
        """Id of a frozen case -> what it gave when it was measured, each with the name of its file."""
        out = collections.defaultdict[str, list[tuple[str, Recorded]]](list)
        for name, one in self.frozen.items() if not self.measuring else ():
            out[one.case.id] += [(Path(name).stem, gave) for gave in recorded.read(one.recorded, name)]
        return out


class Retired(Exception):
    """This process must not judge anybody any more: `parity.protocol.process_state.broken`."""
