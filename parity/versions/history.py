"""Real upstream failures as records: each must show on the releases that had it and be gone on those that do not.

A record is a TOML file in cases/history/ beside the frozen case that shows the failure:

    what            one sentence
    link            where it is reported or was repaired, if known
    package         what `parity bisect` searches
    bad, good       versions of it on which the check was run; "0.23.0 liger-kernel==0.6.5" asks for a partner too
    case            JSON file in the same folder
    implementation  id of the one that shows it
    quantities      which of its quantities count; default: all
    expect          verdict on the bad releases: disagree (default), refused, crashed; a refusal is a control
    then            verdict on the good ones: agree (default), refused (they say so instead of being wrong)
    moves           settings of the frozen case without which it would not show; `--recall` tells records apart by them

`recheck` runs each record's case on all of its releases. `recall` forgets the frozen cases, and says which records a run of a
profile finds: `parity run` draws the cases of a record's family for its implementation in a bad release. One of them finds the
record when it fails there in the record's quantities, moves what the record says (`moves`), and answers as recorded on the good
release next to it: several failures end with one release. What the good one refuses it cannot clear: there the nearest case that
it takes must answer so on both.
"""

import itertools
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta
from packaging.version import Version

from parity import data
from parity.case.case import Case
from parity.decoding import convert, text_of, toml_of
from parity.errors import AGREE, NEW, NOTHING, UsageError
from parity.results.report import measured
from parity.results.report.rows import read
from parity.results.report.wording import ratio
from parity.results.row import Row
from parity.running.run import FIXED_SEED
from parity.sampling.find import case_of
from parity.versions.bisect import Measurement
from parity.versions.client import EnvironmentUnusable, one_line
from parity.versions.environment import Environment
from parity.versions.look import CaseCheck, look

TRIED = 100  # failing cases of a record that are looked at on the good release
CPU_LIMIT = 4 * 3600.0
_Text = Annotated[str, Meta(min_length=1, pattern=r"^\S")]
_Texts = Annotated[tuple[_Text, ...], Meta(min_length=1)]


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, dict=True):
    """One failure: the fields of its file, which are explained above, and `path`, where that is."""

    what: _Text
    package: _Text
    bad: _Texts
    good: _Texts
    case: _Text
    implementation: _Text
    link: str = ""
    quantities: _Texts = ("*",)
    expect: Literal["disagree", "refused", "crashed"] = "disagree"
    then: Literal["agree", "refused"] = "agree"
    moves: tuple[_Text, ...] = ()
    path: str = ""

    @property
    def id(self) -> str:
        return Path(self.path).stem

    @property
    def file(self) -> Path:
        return Path(self.path).with_name(self.case)

    @cached_property
    def check(self) -> CaseCheck:
        failure = "crashed" if self.expect == "crashed" else "disagree"
        return CaseCheck(self.id, Case.load(self.file), self.implementation, self.quantities, failure)

    def specs(self, side: _Texts) -> list[tuple[str, ...]]:
        """The specs of each environment of a side, `bad` or `good`."""
        return [(f"{self.package}=={version}", *others) for version, *others in map(str.split, side)]


@dataclass(frozen=True)
class Recheck:
    """What a record's check answered in one environment; `as_recorded` None where it could not be run."""

    record: Record
    specs: tuple[str, ...]
    bad: bool
    answer: Measurement
    as_recorded: bool | None


def folder() -> Path:
    return data.cases_dir() / "history"


def load(ids: Sequence[str] = ()) -> list[Record]:
    """The records, or the named ones. Raises UsageError for one that cannot be read, or does not exist."""
    found = {path.stem: path for path in sorted(folder().glob("*.toml"))}
    for name in ids:
        if name not in found:
            raise UsageError(f"record {name!r} is unknown, choose from {', '.join(found) or 'none: no records here'}")
    return [_read(found[name]) for name in (ids or found)]


def _read(path: Path) -> Record:
    raw = toml_of(text_of(path, "record"), str(path), "record")
    found: Record = convert(Record, raw | {"path": str(path)}, str(path))
    if unmoved := set(found.moves) - found.check.case.settings.keys():
        raise UsageError(f"{path}: moves names {', '.join(sorted(unmoved))}, which its frozen case leaves at default")
    return found


def recheck(records: Sequence[Record], say: Callable[[str], None], device: str = "cpu") -> list[Recheck]:
    """Runs every record on each of its releases, one process an environment; `say` gets each result as text."""
    wanted: dict[tuple[str, ...], list[tuple[Record, bool]]] = {}
    for record in records:
        for bad, side in ((True, record.bad), (False, record.good)):
            for specs in record.specs(side):
                wanted.setdefault(specs, []).append((record, bad))
    out: list[Recheck] = []
    for specs, asked in wanted.items():
        for finding in _in_environment(specs, asked, device):
            out.append(finding)
            mark = {True: ", as recorded", False: ", NOT AS RECORDED", None: ""}[finding.as_recorded]
            said = f": {finding.answer.message}" if finding.answer.message else ""
            say(f"{' '.join(specs)}  {finding.record.id}: {finding.answer.verdict}{mark}{said}")
    return out


def _in_environment(specs: tuple[str, ...], asked: Sequence[tuple[Record, bool]], device: str) -> list[Recheck]:
    try:
        cases = {record.check.case.id: record.check.case for record, _ in asked}
        implementations = sorted({record.check.implementation for record, _ in asked})
        found = look(Environment.of(specs), list(cases.values()), implementations, device=device).rows
    except EnvironmentUnusable as error:
        return [Recheck(record, specs, bad, Measurement("not run", message=str(error)), None) for record, bad in asked]
    answers = [(record, bad, record.check.answer(found)) for record, bad in asked]
    return [Recheck(r, specs, bad, a, a.verdict == (r.expect if bad else r.then)) for r, bad, a in answers]


def version(specs: tuple[str, ...]) -> Version:
    """Of the package that an environment was asked for first."""
    return Version(specs[0].partition("==")[2])


def table(findings: Sequence[Recheck]) -> str:
    """The recall table, Markdown: a line a record; error ÷ allowed is the largest of a bad release."""
    heads = ["record", "failure", "shown by", "red on", "green on", "error ÷ allowed"]
    lines = []
    records = {f.record.id: f.record for f in sorted(findings, key=lambda f: f.record.id)}
    for record in records.values():
        of_record = [f for f in findings if f.record is record]
        of_record.sort(key=lambda f: version(f.specs))
        sides = [", ".join(_version(f) for f in of_record if f.bad is bad) for bad in (True, False)]
        sizes = [f.answer.headroom for f in of_record if f.bad and f.answer.verdict == "disagree"]
        size = "" if not sizes else "not finite" if None in sizes else ratio(max(filter(None, sizes)))
        lines.append([record.id, record.what, f"`{record.check.implementation}`", *sides, size])
    whole = sum(all(f.as_recorded for f in findings if f.record is r) for r in records.values())
    return "\n".join([*measured.table(heads, lines), "", f"{whole} of {len(records)} records recalled"])


def _version(finding: Recheck) -> str:
    first, *others = finding.specs
    text = first.replace("==", " ") + "".join(f" + {other.replace('==', ' ')}" for other in others)
    if finding.as_recorded is None:
        return f"{text} (not run)"
    verdict = finding.answer.verdict
    return text + ("" if verdict in ("disagree", "agree") and finding.as_recorded else f" ({verdict})")


def exit_code(findings: Sequence[Recheck]) -> int:
    """3 when an environment was unusable, 1 when a record is not as recorded, else 0."""
    if not findings or any(f.as_recorded is None for f in findings):
        return NOTHING
    return AGREE if all(f.as_recorded for f in findings) else NEW


@dataclass(frozen=True)
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
    of = partial(replace, record.check)
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


def side_by_side(record: Record) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """A bad release and a good one without another of the record's between them; the newest failure that was mended, if any."""
    wrong, right = record.specs(record.bad), record.specs(record.good)
    pairs = [(bad, good) for good in right for bad in wrong if version(bad) < version(good)]
    if not pairs:
        return min(wrong, key=version), max(right, key=version)
    newest = max((bad for bad, _ in pairs), key=version)
    return newest, min((good for bad, good in pairs if bad == newest), key=version)


def recall_table(seen: Sequence[RecordSeen], profile: str) -> str:
    """Which records the profile finds, and why not the others, Markdown."""
    cells = [
        [s.record.id, f"`{s.record.check.implementation}`", f"{s.failed:,} of {s.cases:,}", s.first.id if s.first else "", s.why]
        for s in seen
    ]  # fmt: skip
    lines = measured.table(["record", "implementation", "cases that fail", "found by", "why not"], cells)
    found = sum(one.first is not None for one in seen)
    of = f"{found} of {len(seen)} records ({measured.share(found, len(seen))})"
    return "\n".join([*lines, "", f"Profile {profile} finds {of} without the frozen cases."])
