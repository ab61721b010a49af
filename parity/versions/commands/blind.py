"""`parity history --blind`: which records the plain draws of a profile find, the frozen cases forgotten.

The cases are those that a run of the profile draws, or lists for a trainer, in the record's family. One of them finds the
record when it fails in the record's quantities on a bad release, answers as recorded on the good one next to it, and moves
what the record says (`moves`): several failures end with one release. What the good one refuses it cannot clear: there the
case, with what the good one refuses at its default, must fail on the bad one and answer as recorded on the good one, as a
finding does that is minimised. `python -m parity.versions.commands.blind` looks at
the cases in the environment that it runs in.
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
from parity.implementations.implementation import Implementation
from parity.process import prepare
from parity.registry import load, loss_family, run_case, select
from parity.results.report import measured
from parity.results.row import Row
from parity.running.accepting import Accepting, Draws, refused
from parity.running.plan import DTYPES
from parity.running.run import FIXED_SEED
from parity.running.shard import STREAMS, selected
from parity.trainers import catalogue
from parity.versions.commands.history import Record
from parity.versions.commands.probe import print_json, printed, ran
from parity.versions.env.client import EnvironmentUnusable
from parity.versions.env.environment import Environment
from parity.versions.search.checks import CaseCheck

BATCHES = 2, 4, 6
"""Failing cases of a record that are tried on the good release, one batch after the other until one finds it."""
ACCEPTED = "accepted"
CPU_LIMIT = 3600.0
_LINE = "parity-blind "


@dataclasses.dataclass(frozen=True)
class RecordSeen:
    """What the cases of a profile showed of a record: how many there are, how many move what it says and are dealt to its
    implementation, how many of those failed (at most the sum of `BATCHES`), the number of the first asked that finds it
    (`nearest` first), and why none does."""

    record: Record
    cases: int
    could: int
    failed: int = 0
    first: int | None = None
    why: str = ""


def recall(
    records: Sequence[Record], profile: str, say: Callable[[str], None], device: str = "cpu"
) -> list[RecordSeen]:
    """Every record that is a failure and no refusal, one pair of releases after the other; `say` gets each as text."""
    asked = [r for r in records if r.expect != "refused"]
    pairs: dict[tuple[tuple[str, ...], tuple[str, ...]], list[Record]] = {}
    for r in asked:
        pairs.setdefault(side_by_side(r), []).append(r)
    drawn = {f: [*itertools.chain(*of_profile(f, profile))] for f in sorted({r.check.case.family for r in asked})}
    by_id, out = {r.id: r for r in asked}, {}
    for (bad, good), here in sorted(pairs.items(), key=lambda pair: -len(pair[1])):
        could = {r.id: nearest(r, (c for c in drawn[r.check.case.family] if fits(r, c, profile, device))) for r in here}
        for id, (hits, found, why) in _apart(here, could, bad, good, profile, device).items():
            every = drawn[by_id[id].check.case.family]
            first = every.index(found) + 1 if found else None
            out[id] = RecordSeen(by_id[id], len(every), len(could[id]), hits, first, why)
            say(f"{id}: {f'case {first}' if first else why} ({len(could[id])} of {len(every)} cases)")
    return [out[r.id] for r in asked]


def _apart(
    records: Sequence[Record],
    could: Mapping[str, Sequence[Case]],
    bad: tuple[str, ...],
    good: tuple[str, ...],
    profile: str,
    device: str,
) -> dict[str, tuple[int, Case | None, str]]:
    """Record -> how many of its cases failed on the bad release, the first that answers as recorded on the good one too,
    and why there is none. What is found is not asked again; cases are run on until `BATCHES` are used up."""
    out: dict[str, tuple[int, Case | None, str]] = {}
    drawn: dict[str, dict[str, Case]] = {r.id: {} for r in records}
    left, failed = dict(could), dict.fromkeys(could, 0)
    seen, then = ({r.id: Counter[str]() for r in records} for _ in range(2))  # what else each side answers
    out |= {r.id: (0, None, "no case has what it needs") for r in records if not could[r.id]}
    for batch in BATCHES:
        open_ = [r for r in records if r.id not in out]
        wrong, why = _look(bad, [(r, left[r.id], r.expect, batch) for r in open_], profile, device)
        out |= {r.id: (failed[r.id], None, why) for r in open_ if why}
        hits = [r for r in open_ if r.id in wrong and wrong[r.id][0]]
        for r in hits:
            drawn[r.id] |= {ran.id: asked for asked, ran in wrong[r.id][0]}
        right, why = _look(
            good, [(r, [ran for _, ran in wrong[r.id][0]], r.then, batch) for r in hits], ACCEPTED, device
        )
        both = {id: [pair for pair in shown if pair[0] == pair[1]] for id, (shown, _) in right.items()}
        less = [r for r in hits if r.id in right and not both[r.id] and right[r.id][0]]
        still, _ = _look(bad, [(r, [ran for _, ran in right[r.id][0]], r.expect, 1) for r in less], None, device)
        both |= {id: [p for p in right[id][0] if p[1] == shown[0][0]] for id, (shown, _) in still.items() if shown}
        for r in open_:
            shown, others = wrong.get(r.id, ([], {}))
            seen[r.id] += Counter(others)
            failed[r.id] += len(shown)
            then[r.id] += Counter(right[r.id][1] if r.id in right else {})
            if both.get(r.id):
                out[r.id] = failed[r.id], drawn[r.id][both[r.id][0][0].id], ""
            elif r.id not in out and (why or len(shown) < batch or batch == BATCHES[-1]):
                none = f"{failed[r.id]} fail, on the good release {_told(then[r.id])}" if failed[r.id] else "none fails"
                told = _told(seen[r.id])
                out[r.id] = failed[r.id], None, why or (f"{none} ({told})" if told else none)
            elif r.id not in out:
                left[r.id] = left[r.id][left[r.id].index(shown[-1][0]) + 1 :]
    return out


def _told(answers: Counter[str]) -> str:
    return ", ".join(f"{count} {verdict}" for verdict, count in answers.most_common(5))


def of_profile(family: str, profile: str) -> Iterator[list[Case]]:
    """The cases that a run of the profile with its fixed seed draws of a family, in order, stream by stream, or lists for a
    trainer."""
    if catalogue.is_trainer(family):
        yield list(catalogue.cases(family, profile, FIXED_SEED))
        return
    found = loss_family(family)
    for index, count in enumerate(streams(found.drawn[profile], "cpu")):
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

    def away(case: Case) -> float:
        both = [(case.settings.get(n), frozen.settings.get(n)) for n in case.settings.keys() | frozen.settings.keys()]
        return (case.dtype != frozen.dtype) + sum(_apart_by(ours, theirs) for ours, theirs in both)

    return sorted(found, key=away)


def _apart_by(ours: object, theirs: object) -> float:
    if ours == theirs:
        return 0.0
    sizes = [float(x) for x in (ours, theirs) if isinstance(x, int | float) and not isinstance(x, bool) and x > 0]
    return min(1.0, abs(math.log2(sizes[0] / sizes[1]))) if len(sizes) == 2 else 1.0


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
) -> tuple[dict[str, tuple[list[tuple[Case, Case]], dict[str, int]]], str]:
    """Record -> the first cases, as many as asked for, that answer as expected in one environment, each beside itself or,
    with `moving`, beside what the case is moved to where the implementation refuses it: by a run of that profile, or, with
    `ACCEPTED`, in any case; how many of those before them answer what
    else; why the environment is unusable."""
    plan = [
        [r.id, r.check.implementation, r.check.quantities, expected, count, list(r.moves), [c.to_json() for c in found]]
        for r, found, expected, count in asked
    ]
    if not plan:
        return {}, ""
    try:
        done = ran(
            Environment.of(specs),
            "parity.versions.commands.blind",
            json.dumps([device, moving, plan]),
            CPU_LIMIT,
            device,
        )
    except EnvironmentUnusable as error:
        return {}, str(error)
    return {
        id: ([(Case.from_json(asked), Case.from_json(ran)) for asked, ran in found], others)
        for id, found, others in map(json.loads, printed(done, _LINE))
    }, ""


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
    away = Moving(moving, device) if moving else None
    for id, implementation, quantities, expected, count, moves, found in plan:
        chosen = select([implementation])
        shown: list[tuple[Mapping[str, object], Mapping[str, object]]] = []
        others: Counter[str] = Counter()
        for asked in map(Case.from_json, found):
            case = asked
            for case in (asked, *(away.accepted(asked, chosen[0], moves) if away else ())):
                key = implementation, case.id  # two records may ask for it
                if key not in rows:
                    rows[key] = list(run_case(case, chosen, device, thorough=False))
                if not refused(rows[key]):
                    break
            answer = CaseCheck("", case, implementation, tuple(quantities)).answer(rows[key])
            if answer.verdict == expected:
                shown.append((asked.to_json(), case.to_json()))
            else:
                others[f"{answer.verdict}: {answer.message}" if answer.message else answer.verdict] += 1
            if len(shown) == count:
                break
        print_json(_LINE, [id, shown, others])
    return 0


class Moving:
    """What a run of a profile moves its cases to where an implementation refuses them; with `ACCEPTED` every case is moved."""

    def __init__(self, moving: str, device: str):
        self.moving, self.device = moving, device
        self._accepting: dict[str, Accepting] = {}

    def accepted(self, case: Case, implementation: Implementation, moves: Sequence[str]) -> Iterator[Case]:
        """The case moved, if that is done, where that still moves what the record says."""
        if catalogue.is_trainer(case.family):
            return
        accepting = self._accepting.setdefault(implementation.id, Accepting(implementation, self.device))
        accepting.announce = lambda case: True
        if self.moving != ACCEPTED and not self._dealt(case, accepting):
            return
        moved = accepting.without_refused(case)
        if moved is not None and all(moved.settings.get(name) == case.settings.get(name) for name in moves):
            yield moved

    def _dealt(self, case: Case, accepting: Accepting) -> bool:
        def first() -> Sequence[Case]:
            return [*itertools.chain(*itertools.islice(of_profile(case.family, self.moving), STREAMS))]

        cost = PROFILES[self.moving].cost
        gets = functools.partial(selected, accepting.implementation, cost=cost, device=self.device)
        return accepting.deals(case, Draws(first, gets, cost))


if __name__ == "__main__":
    sys.exit(main())
