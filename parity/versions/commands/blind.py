"""`parity history --blind`: which records the plain draws of a profile find, the frozen cases forgotten.

The cases are those that a run of the profile draws, or lists for a trainer, in the record's family. One of them finds the
record when it fails in the record's quantities on a bad release, answers as recorded on the good one next to it, and moves
what the record says (`moves`): several failures end with one release. `python -m parity.versions.commands.blind` looks at
the cases in the environment that it runs in.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from packaging.version import Version

from parity.case.case import Case
from parity.case.drawing import cases, draws
from parity.case.profiles import PROFILES, streams
from parity.process import prepare
from parity.registry import load, loss_family, run_case, select
from parity.results.report import measured
from parity.running.plan import DTYPES
from parity.running.run import FIXED_SEED
from parity.running.shard import selected
from parity.trainers import catalogue
from parity.versions.commands.history import Record
from parity.versions.commands.probe import ran
from parity.versions.env.client import EnvironmentUnusable
from parity.versions.env.environment import Environment
from parity.versions.search.checks import CaseCheck

ENOUGH = 12
"""Failing cases of a record that are tried on the good release."""
CPU_LIMIT = 3600.0
_LINE = "parity-blind "


@dataclasses.dataclass(frozen=True)
class RecordSeen:
    """What the cases of a profile showed of a record: how many there are, how many move what it says and are dealt to its
    implementation, how many of those failed (at most `ENOUGH`), the number of the first that finds it, and why none does."""

    record: Record
    cases: int
    could: int
    failed: int = 0
    first: int | None = None
    why: str = ""


def recall(
    records: Sequence[Record], profile: str, say: Callable[[str], None], device: str = "cpu"
) -> list[RecordSeen]:
    """Every record that is a failure and no refusal; `say` gets each as text. One process for each environment and side."""
    asked = [r for r in records if r.expect != "refused"]
    all_cases = {f: list(of_profile(f, profile)) for f in sorted({r.check.case.family for r in asked})}
    could = {r.id: [c for c in all_cases[r.check.case.family] if fits(r, c, profile, device)] for r in asked}
    sides = {r.id: side_by_side(r) for r in asked}
    failed = _look([(r, sides[r.id][0], could[r.id], r.expect) for r in asked], device)
    agreeing = _look([(r, sides[r.id][1], failed[r.id][0], r.then) for r in asked if failed[r.id][0]], device)
    out = []
    for r in asked:
        every = all_cases[r.check.case.family]
        (hits, why), (good, also) = failed[r.id], agreeing.get(r.id, ([], ""))
        first = min((every.index(case) + 1 for case in good), default=None)
        if first is None and not (why or also):
            why = "no case has what it needs" if not could[r.id] else "none fails"
            why = "those that fail do so on the good release too" if hits else why
        out.append(RecordSeen(r, len(every), len(could[r.id]), len(hits), first, "" if first else why or also))
        say(f"{r.id}: {f'case {first}' if first else out[-1].why} ({len(could[r.id])} of {len(every)} cases)")
    return out


def of_profile(family: str, profile: str) -> Iterator[Case]:
    """The cases that a run of the profile with its fixed seed draws of a family, or lists for a trainer, in order."""
    if catalogue.is_trainer(family):
        yield from catalogue.cases(family, profile, FIXED_SEED)
        return
    found = loss_family(family)
    for index, count in enumerate(streams(found.drawn[profile], "cpu")):
        yield from draws(cases(found, DTYPES, profile), f"{FIXED_SEED}/{family}/{index}", count)


def fits(record: Record, case: Case, profile: str, device: str) -> bool:
    """Whether a case moves what the record needs as its frozen case does, and is dealt to its implementation."""
    frozen = record.check.case
    if not catalogue.is_trainer(case.family) and not selected(
        load()[record.check.implementation], case, PROFILES[profile].cost, device
    ):
        return False
    given = [(case.settings.get(name), frozen.settings.get(name)) for name in record.moves]
    return all(ours is not None and (ours == theirs or not isinstance(theirs, str)) for ours, theirs in given)


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


_Asked = tuple[Record, tuple[str, ...], Sequence[Case], str]


def _look(asked: Sequence[_Asked], device: str) -> dict[str, tuple[list[Case], str]]:
    """Record -> the cases that answer as expected in its environment, and why it could not be looked at."""
    out: dict[str, tuple[list[Case], str]] = {}
    for specs in sorted({one[1] for one in asked}):
        mine = [one for one in asked if one[1] == specs]
        plan = [
            [r.id, r.check.implementation, r.check.quantities, expected, [c.to_json() for c in found]]
            for r, _, found, expected in mine
        ]
        try:
            done = ran(
                Environment.of(specs), "parity.versions.commands.blind", json.dumps([device, plan]), CPU_LIMIT, device
            )
            lines = [json.loads(x.removeprefix(_LINE)) for x in done.stdout.splitlines() if x.startswith(_LINE)]
            out |= {id: ([Case.from_json(c) for c in found], "") for id, found in lines}
        except EnvironmentUnusable as error:
            out |= {r.id: ([], str(error)) for r, *_ in mine}
    return out


def table(seen: Sequence[RecordSeen], profile: str) -> str:
    """Which records the profile finds, and why not the others, Markdown."""
    lines = ["| record | implementation | could show it | found by case | why not |", "|---|---|---|---|---|"]
    for one in seen:
        first = "" if one.first is None else f"{one.first:,}"
        name = f"`{one.record.check.implementation}`"
        lines.append(f"| {one.record.id} | {name} | {one.could:,} of {one.cases:,} | {first} | {one.why} |")
    found = sum(one.first is not None for one in seen)
    share = measured.share(found, len(seen))
    sentence = f"Profile {profile} finds {found} of {len(seen)} records ({share}) without the frozen cases."
    return "\n".join([*lines, "", sentence])


def main() -> int:
    """Looks at the cases of its plan, those of a record until `ENOUGH` answer as expected; prints these."""
    device, plan = json.load(sys.stdin)
    prepare(device, threads=1)
    for id, implementation, quantities, expected, found in plan:
        shown = list(_answering(implementation, quantities, expected, map(Case.from_json, found), device))
        sys.stdout.write(f"\n{_LINE}{json.dumps([id, shown])}\n")
        sys.stdout.flush()
    return 0


def _answering(
    implementation: str, quantities: Sequence[str], expected: str, found: Iterable[Case], device: str
) -> Iterator[Mapping[str, object]]:
    chosen, count = select([implementation]), 0
    for case in found:
        rows = list(run_case(case, chosen, device, thorough=False))
        if CaseCheck("", case, implementation, tuple(quantities)).answer(rows).verdict == expected:
            yield case.to_json()
            count += 1
            if count == ENOUGH:
                return


if __name__ == "__main__":
    sys.exit(main())
