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
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
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
from parity.results.report.wording import ratio
from parity.versions.bisect import Measurement
from parity.versions.client import EnvironmentUnusable
from parity.versions.environment import Environment
from parity.versions.look import CaseCheck, look

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


def recall(records: Sequence[Record], say: Callable[[str], None], device: str = "cpu") -> list[Recheck]:
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
