"""`parity history --recall`: which records a run of a profile finds, the frozen cases forgotten.

`parity run` draws the cases of a record's family for its implementation in a bad release. One of them finds the record when it
fails there in the record's quantities, moves what the record says (`moves`), and answers as recorded on the good release next
to it: several failures end with one release. What the good one refuses it cannot clear: there the nearest case that it takes
must answer so on both.
"""

import dataclasses
import functools
import itertools
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from parity.case.case import Case
from parity.results.report import measured
from parity.results.report.rows import read
from parity.results.row import Row
from parity.running.run import FIXED_SEED
from parity.sampling.find import case_of
from parity.versions.client import EnvironmentUnusable, one_line
from parity.versions.environment import Environment
from parity.versions.history import Record, version
from parity.versions.look import look

TRIED = 100  # failing cases of a record that are looked at on the good release
CPU_LIMIT = 4 * 3600.0
Sides = tuple[tuple[str, ...], tuple[str, ...]]


@dataclasses.dataclass(frozen=True)
class RecordSeen:
    """What a run showed of a record: cases that move what it says, how many fail, the first that finds it, or why none."""

    record: Record
    cases: int = 0
    failed: int = 0
    first: Case | None = None
    why: str = ""


def recall(
    records: Sequence[Record], profile: str, say: Callable[[str], None], device: str = "cpu"
) -> list[RecordSeen]:
    """Every record that is a failure and no refusal, one pair of releases after the other; `say` gets each as text."""
    asked = [r for r in records if r.expect != "refused"]
    out: dict[str, RecordSeen] = {}
    for (bad, good), group in itertools.groupby(sorted(asked, key=side_by_side), side_by_side):
        here = list(group)
        try:
            seen = _found(here, profile, bad, good, device)
        except EnvironmentUnusable as error:
            seen = [RecordSeen(r, why=str(error)) for r in here]
        for one in seen:
            out[one.record.id] = one
            say(f"{one.record.id}: {one.first.id if one.first else one.why} ({one.failed} of {one.cases} cases fail)")
    return [out[r.id] for r in asked]


def drawn(made: Environment, records: Iterable[Record], profile: str, device: str) -> list[Row]:
    """What `parity run` of the records' families and implementations writes in an environment, but of frozen cases."""
    checks = [record.check for record in records]
    with tempfile.TemporaryDirectory() as folder:
        words = ["run", "--profile", profile, "--seed", str(FIXED_SEED), "--device", device, "--no-minimise"]
        named = {"--family": [c.case.family for c in checks], "--implementation": [c.implementation for c in checks]}
        words += [word for option, values in named.items() for one in sorted({*values}) for word in (option, one)]
        command = ["python", "-m", "parity", *words, "--reports", folder]
        done = made.run(command, capture=True, cpu_limit=CPU_LIMIT)
        if not (file := Path(folder) / "results.ndjson").exists():
            raise EnvironmentUnusable(f"environment {made.name}: {one_line(done.stderr)}")
        return [row for row in read(file)[1] if not row.frozen]


def _found(
    records: Sequence[Record], profile: str, bad: tuple[str, ...], good: tuple[str, ...], device: str
) -> list[RecordSeen]:
    """Of each record the first of its cases that fails and answers as recorded on the good release, or why there is none."""
    there = drawn(Environment.of(bad), records, profile, device)
    cases = {r.id: _cases(there, r) for r in records}
    failing = {r.id: _answering(there, r, r.expect)[:TRIED] for r in records}
    wanted = sorted({r.check.implementation for r in records if failing[r.id]})
    asked = {case.id: case for of_record in failing.values() for case in of_record}
    right = look(Environment.of(good), list(asked.values()), wanted, device=device, near=True).rows if asked else []
    cleared = {r.id: _answering(right, r, r.then) for r in records}
    near = {case.id: case for of_record in cleared.values() for case in of_record if case.id not in asked}
    again = look(Environment.of(bad), list(near.values()), wanted, device=device).rows if near else []
    out = []
    for r in records:
        both = [case for case in cleared[r.id] if case in failing[r.id]]
        both += [case for case in _answering(again, r, r.expect) if case in cleared[r.id]]
        none = "no case has what it needs" if not cases[r.id] else "none fails"
        why = "none that fails is as recorded on the good release" if failing[r.id] else none
        first = both[0] if both else None
        out.append(RecordSeen(r, len(cases[r.id]), len(failing[r.id]), first, "" if both else why))
    return out


def _answering(found: Iterable[Row], record: Record, verdict: str) -> list[Case]:
    """The record's cases to which its check gives the verdict."""
    of = functools.partial(dataclasses.replace, record.check)
    return [case for case, mine in _cases(found, record) if of(case=case).answer(mine).verdict == verdict]


def _cases(found: Iterable[Row], record: Record) -> list[tuple[Case, list[Row]]]:
    """The cases of the record's implementation that move what it needs, in the order of the run, each with its rows."""
    mine: dict[str, list[Row]] = {}
    for row in found:
        if (row.implementation, row.family) == (record.check.implementation, record.check.case.family):
            mine.setdefault(row.case, []).append(row)
    known = [(case_of(of_case[0]), of_case) for of_case in mine.values()]
    return [(case, of_case) for case, of_case in known if case is not None and fits(record, case)]


def fits(record: Record, case: Case) -> bool:
    """Whether a case moves what the record needs: a word as its frozen case does, a number to any value."""
    given = [(case.settings.get(name), record.check.case.settings.get(name)) for name in record.moves]
    return all(ours is not None and (ours == theirs or not isinstance(theirs, str)) for ours, theirs in given)


def side_by_side(record: Record) -> Sides:
    """A bad release and a good one without another of the record's between them; the newest failure that was mended, if any."""
    wrong, right = record.specs(record.bad), record.specs(record.good)
    pairs = [(bad, good) for good in right for bad in wrong if version(bad) < version(good)]
    if not pairs:
        return min(wrong, key=version), max(right, key=version)
    newest = max((bad for bad, _ in pairs), key=version)
    return newest, min((good for bad, good in pairs if bad == newest), key=version)


def table(seen: Sequence[RecordSeen], profile: str) -> str:
    """Which records the profile finds, and why not the others, Markdown."""
    cells = [
        [s.record.id, f"`{s.record.check.implementation}`", f"{s.failed:,} of {s.cases:,}", s.first.id if s.first else "", s.why]
        for s in seen
    ]  # fmt: skip
    lines = measured.table(["record", "implementation", "cases that fail", "found by", "why not"], cells)
    found = sum(one.first is not None for one in seen)
    of = f"{found} of {len(seen)} records ({measured.share(found, len(seen))})"
    return "\n".join([*lines, "", f"Profile {profile} finds {of} without the frozen cases."])
