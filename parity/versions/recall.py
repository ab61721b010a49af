"""`parity history --recall`: which records the plain draws of a profile find, the frozen cases forgotten.

The cases are those that a run of the profile draws, or lists for a trainer, in the record's family. One of them finds the
record when it fails in the record's quantities on a bad release, answers as recorded on the good one next to it, and moves
what the record says (`moves`): several failures end with one release. What the good one refuses it cannot clear: there the
case, with what the good one refuses at its default, must answer so on both. `python -m parity.versions.recall` looks
at the cases in the environment that it runs in.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from packaging.version import Version

from parity.case.case import Case
from parity.case.drawing import cases, draws
from parity.case.profiles import PROFILES, streams
from parity.process import prepare
from parity.registry import load, loss_family, run_case, select
from parity.results.report import measured
from parity.results.row import Row
from parity.running.capabilities import besides
from parity.running.capabilities import nearest as nearest_taken
from parity.running.plan import DTYPES
from parity.running.run import FIXED_SEED
from parity.running.shard import STREAMS, selected
from parity.trainers import catalogue
from parity.versions.case_check import CaseCheck
from parity.versions.client import EnvironmentUnusable
from parity.versions.environment import Environment
from parity.versions.history import Record
from parity.versions.look import print_json, printed, ran

BATCHES = 2, 4, 6
"""Failing cases of a record that are tried on the good release, one batch after the other until one finds it."""
ACCEPTED = "accepted"
CPU_LIMIT = 3600.0
_LINE = "parity-recall "
Sides = tuple[tuple[str, ...], tuple[str, ...]]
Pairs = list[tuple[Case, Case]]
"""Cases, each beside what it was moved to where the implementation refuses it, else beside itself."""


@dataclasses.dataclass(frozen=True)
class RecordSeen:
    """What the cases of a profile showed of a record: how many there are, how many move what it says and are dealt to its
    implementation, the number of the first asked that finds it (`nearest` first), and why none does."""

    record: Record
    cases: int
    could: int
    first: int | None = None
    why: str = ""


def recall(
    records: Sequence[Record], profile: str, say: Callable[[str], None], device: str = "cpu"
) -> list[RecordSeen]:
    """Every record that is a failure and no refusal, one pair of releases after the other; `say` gets each as text."""
    asked = [r for r in records if r.expect != "refused"]
    pairs: dict[Sides, list[Record]] = {}
    for r in asked:
        pairs.setdefault(side_by_side(r), []).append(r)
    drawn = {f: [*itertools.chain(*of_profile(f, profile))] for f in sorted({r.check.case.family for r in asked})}
    out = {}
    for (bad, good), here in sorted(pairs.items(), key=lambda pair: -len(pair[1])):
        could = {r.id: nearest(r, (c for c in drawn[r.check.case.family] if fits(r, c, profile, device))) for r in here}
        found = _found(here, could, bad, good, profile, device)
        for r in here:
            every, (case, why) = drawn[r.check.case.family], found[r.id]
            first = every.index(case) + 1 if case else None
            out[r.id] = RecordSeen(r, len(every), len(could[r.id]), first, why)
            say(f"{r.id}: {f'case {first}' if first else why} ({len(could[r.id])} of {len(every)} cases)")
    return [out[r.id] for r in asked]


def _found(
    records: Sequence[Record],
    could: Mapping[str, Sequence[Case]],
    bad: tuple[str, ...],
    good: tuple[str, ...],
    profile: str,
    device: str,
) -> dict[str, tuple[Case | None, str]]:
    """Record -> the first of its cases that fails on the bad release and answers as recorded on the good one, or why none."""
    out: dict[str, tuple[Case | None, str]] = {}
    out |= {r.id: (None, "no case has what it needs") for r in records if not could[r.id]}
    left, failed = dict(could), Counter[str]()
    for batch in BATCHES:
        here = [r for r in records if r.id not in out]
        try:
            wrong = _look(bad, [(r, left[r.id], r.expect, batch) for r in here], profile, device)
            tried = [(r, [ran for _, ran in wrong[r.id]], r.then, batch) for r in here if wrong[r.id]]
            right = _look(good, tried, ACCEPTED, device)
            moved = [(r, [ran for _, ran in right[r.id]], r.expect, 1) for r, *_ in tried if _only_moved(right[r.id])]
            still = _look(bad, moved, None, device)
        except EnvironmentUnusable as error:
            return out | {r.id: (None, str(error)) for r in here}
        for r in here:
            shown, again = wrong[r.id], [case for case, _ in still.get(r.id, ())]
            hits = {a.id for a, ran in right.get(r.id, ()) if a == ran or ran in again}
            failed[r.id] += len(shown)
            if case := next((case for case, ran in shown if ran.id in hits), None):
                out[r.id] = case, ""
            elif len(shown) < batch or batch == BATCHES[-1]:
                none = f"{failed[r.id]} fail, none is as recorded on the good release"
                out[r.id] = None, none if failed[r.id] else "none fails"
            else:
                left[r.id] = left[r.id][left[r.id].index(shown[-1][0]) + 1 :]
    return out


def _only_moved(found: Pairs) -> bool:
    """Whether every case that answers was refused as it was asked: it has to fail on the bad release as it ran."""
    return bool(found) and all(asked != ran for asked, ran in found)


def of_profile(family: str, profile: str) -> Iterator[list[Case]]:
    """The cases that a run of the profile with its fixed seed draws of a family, in order, stream by stream, or lists for a
    trainer."""
    if catalogue.is_trainer(family):
        yield list(catalogue.cases(family, profile, FIXED_SEED))
        return
    found = loss_family(family)
    for index, count in enumerate(streams(found.drawing.counts[profile], "cpu")):
        yield list(draws(cases(found, DTYPES, profile), f"{FIXED_SEED}/{family}/{index}", count))


def fits(record: Record, case: Case, profile: str, device: str) -> bool:
    """Whether a case moves what the record needs as its frozen case does, and is dealt to its implementation."""
    frozen = record.check.case
    if not catalogue.is_trainer(case.family) and not selected(
        load()[record.check.implementation], case, PROFILES[profile].cost, device
    ):
        return False
    given = [(case.settings.get(name), frozen.settings.get(name)) for name in record.moves]
    return all(ours is not None and (ours == theirs or not isinstance(theirs, str)) for ours, theirs in given)


def nearest(record: Record, found: Iterable[Case]) -> list[Case]:
    """The cases, those first that are most like the frozen one: `BATCHES` is spent where what the record says can show.

    A case is away from it by one for another dtype, for a setting that only one of them has and for another value without a
    size, and by |log₂(ours/theirs)|, at most one, for a number of another size. It decides in which order cases are asked.
    """
    frozen = record.check.case

    def apart(ours: object, theirs: object) -> float:
        sizes = [float(x) for x in (ours, theirs) if isinstance(x, int | float) and not isinstance(x, bool) and x > 0]
        both = len(sizes) == 2
        return float(ours != theirs) if not both else min(1.0, abs(math.log2(sizes[0] / sizes[1])))

    def away(case: Case) -> float:
        names = case.settings.keys() | frozen.settings.keys()
        moved = sum(apart(case.settings.get(n), frozen.settings.get(n)) for n in names)
        return (case.dtype != frozen.dtype) + moved

    return sorted(found, key=away)


def side_by_side(record: Record) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """A bad release and a good one without another of the record's between them; the newest failure that was mended, if any."""

    def version(specs: tuple[str, ...]) -> Version:
        return Version(specs[0].partition("==")[2])

    mended = [
        (max(old, key=version), good)
        for good in record.good
        if (old := [b for b in record.bad if version(b) < version(good)])
    ]
    if mended:
        newest = max(mended, key=lambda pair: version(pair[0]))[0]
        return newest, min((good for bad, good in mended if bad == newest), key=version)
    return min(record.bad, key=version), max(record.good, key=version)


def _look(
    specs: tuple[str, ...], asked: Sequence[tuple[Record, Sequence[Case], str, int]], moving: str | None, device: str
) -> dict[str, Pairs]:
    """Record -> the first cases, as many as asked for, that answer as expected in one environment.

    Those that the implementation refuses are moved with `moving`: as a run of that profile does it, or, with `ACCEPTED`, all.
    """
    plan = [
        [r.id, r.check.implementation, r.check.quantities, expected, count, list(r.moves), [c.to_json() for c in found]]
        for r, found, expected, count in asked
    ]
    if not plan:
        return {}
    stdin = json.dumps([device, moving, plan])
    done = ran(Environment.of(specs), "parity.versions.recall", stdin, CPU_LIMIT, device)
    return {
        id: [(Case.from_json(asked), Case.from_json(ran)) for asked, ran in found]
        for id, found in map(json.loads, printed(done, _LINE))
    }


def table(seen: Sequence[RecordSeen], profile: str) -> str:
    """Which records the profile finds, and why not the others, Markdown."""
    rows = []
    for one in seen:
        first = "" if one.first is None else f"{one.first:,}"
        could = f"{one.could:,} of {one.cases:,}"
        rows.append([one.record.id, f"`{one.record.check.implementation}`", could, first, one.why])
    lines = measured.table(["record", "implementation", "could show it", "found by case", "why not"], rows)
    found = sum(one.first is not None for one in seen)
    share = measured.share(found, len(seen))
    sentence = f"Profile {profile} finds {found} of {len(seen)} records ({share}) without the frozen cases."
    return "\n".join([*lines, "", sentence])


def main() -> int:
    """Looks at the cases of its plan, those of a record until enough answer as expected; prints these."""
    device, moving, plan = json.load(sys.stdin)
    prepare(device, threads=1)
    rows: dict[tuple[str, str], list[Row]] = {}
    for id, implementation, quantities, expected, count, moves, found in plan:
        (chosen,) = select([implementation])
        shown: list[tuple[Mapping[str, object], Mapping[str, object]]] = []
        for asked in map(Case.from_json, found):
            case = asked
            for case in (asked, *(_moved(asked, implementation, moving, moves, device) if moving else ())):
                key = implementation, case.id  # two records may ask for it
                if key not in rows:
                    rows[key] = list(run_case(case, [chosen], device, thorough=False))
                if not _refused(rows[key]):
                    break
            if CaseCheck("", case, implementation, tuple(quantities)).answer(rows[key]).verdict == expected:
                shown.append((asked.to_json(), case.to_json()))
            if len(shown) == count:
                break
        print_json(_LINE, [id, shown])
    return 0


@functools.cache
def _besides(implementation: str, profile: str, device: str) -> dict[str, Case]:
    """The draws that a run of the profile gives an implementation moved to where it takes them."""
    (chosen,) = select([implementation])
    drawn = [*itertools.chain(*itertools.islice(of_profile(chosen.family, profile), STREAMS))]
    known = PROFILES[profile]
    gets = functools.partial(selected, chosen, cost=known.cost, device=device)
    found = besides(chosen, drawn, gets, known.least, device, known.cost == 1)
    return {case.id: near for case, near in reversed(found)}


def _moved(case: Case, implementation: str, moving: str, moves: Sequence[str], device: str) -> Iterator[Case]:
    """The case moved to where it is taken, if a run of the profile does that and it still moves what the record says."""
    if catalogue.is_trainer(case.family):
        return
    found = _besides(implementation, moving, device).get(case.id) if moving != ACCEPTED else None
    if moving == ACCEPTED:
        found = nearest_taken(load()[implementation], case, device)
    if found not in (None, case) and all(found.settings.get(name) == case.settings.get(name) for name in moves):
        yield found


def _refused(rows: Sequence[Row]) -> bool:
    return bool(rows) and all(row.verdict in ("unsupported", "refused") for row in rows)


if __name__ == "__main__":
    sys.exit(main())
