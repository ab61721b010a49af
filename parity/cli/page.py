"""What a page shows beside the rows: scripts of findings, kept runs, and what other commands left among the reports."""

import base64
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from parity import data
from parity.case.case import Case
from parity.errors import UsageError
from parity.results import memory
from parity.results.header import Header
from parity.results.json_output import CoveredOut
from parity.results.report import timings
from parity.results.report.findings import Finding
from parity.results.report.html import Cell, Extras, Folded, Part
from parity.results.report.summary import Summary
from parity.results.row import Row
from parity.rollouts import report

NIGHT = ("verdict", "minutes", "command", "printed last")
JUDGED = "Judged by setting, field and key"
SCRIPTS = 10
"""New findings whose script is written into the page; for the others it names the command."""


def extras(
    header: Header, summary: Summary, folder: Path, code: int, reasons: Sequence[str], rows: Sequence[Row] = ()
) -> Extras:
    """All of it; a file that cannot be read is a section that says so."""
    found: list[Part] = []
    for name, title, read in (
        ("audit.ndjson", "Settings audit", audit),
        ("mutants.ndjson", "Mutants", mutants),
        ("benchmark.json", "Benchmarks", benchmarks),
    ):
        path = folder / name
        if path.exists():
            found += _read(path, title, lambda path=path, read=read: list(read(path)))  # type: ignore[misc]
    found += _read(data.rollouts_dir(), "Rollouts", lambda: report.parts(rows))
    found += _read(Path("judged"), JUDGED, lambda: list(judged(rows)))
    found += spent(header)
    damaged: list[str] = []
    past = memory.runs(folder / "history", damaged.append)
    found += [Part("history", "Trend of earlier runs", "; ".join(damaged))] if damaged else []
    found[:0] = night([run for run in past if run.id == summary.run])
    return Extras(code, reasons, scripts(summary, folder), found, past)


def night(of: Sequence[memory.Run]) -> list[Part]:
    """The other commands of a night, with what came of them."""
    rows = [
        [Cell(s.verdict, "" if s.search or (s.whole and not s.exit_code) else "over" if s.exit_code else "known")]
        + [f"{s.seconds / 60:.0f}", s.command, " · ".join(s.tail.splitlines()) if s.search or s.exit_code else ""]
        for run in of
        for s in run.steps
    ]
    note = "How far they came is in the verdict. All that they printed is in their logs, beside this page."
    return [Part("night", "Other commands of the night", note, (), [Folded("commands", NIGHT, rows)])] if rows else []


def spent(header: Header) -> list[Part]:
    """Where the CPU time of the run went; nothing for a file that does not say."""
    found = timings.shares(header.parts)
    rows = [[kind, *row.cells] for kind, shares in found.items() for row in shares]
    if not rows:
        return []
    by = ["by", "name", "CPU seconds", "share"]
    return [Part("timings", "Where the time went", tables=[Folded("CPU seconds", by, rows)])]


def judged(rows: Sequence[Row]) -> Iterator[Part]:
    """How many cases judged each implementation with each setting, each trainer with each config field and logged key."""
    from parity.tools.covered import covered

    found, family = covered(rows), {row.implementation: row.family for row in rows}
    if not found:
        return
    of_losses = [c for c in found if c.kind == "setting"]
    of_trainers = [c for c in found if c.kind != "setting"]
    tables = [
        _by_setting(name, [c for c in of_losses if family[c.of] == name])
        for name in dict.fromkeys(row.family for row in rows)
        if any(family[c.of] == name for c in of_losses)
    ]
    if of_trainers:
        lines = [[Cell(c.name, _colour(c)), c.kind, c.of, _times(c), f"{c.declined:,}", c.why] for c in of_trainers]
        heads = ["name", "kind", "trainer", "judged", "declined", "why never"]
        tables.append(Folded(f"trainers: {_never(of_trainers)}", heads, lines))
    note = f"Cases that judged it. {_never(found)}. Red: never judged, and nothing excuses it; in brackets: declined."
    yield Part("judged", JUDGED, note, (), tables)


def _by_setting(family: str, found: Sequence[CoveredOut]) -> Folded:
    """Settings down, implementations across; the setting that most of them were never judged with first."""
    from parity.tools.covered import missing

    by = {(c.name, c.of): c for c in found}
    who = sorted({c.of for c in found})
    names = sorted({c.name for c in found}, key=lambda n: (-sum(missing(c) for c in found if c.name == n), n))
    lines = [[n, *(_times(by[n, w]) if (n, w) in by else Cell("") for w in who)] for n in names]
    return Folded(f"{family}: {_never(found)}", ["setting", *who], lines)


def _times(one: CoveredOut) -> Cell:
    declined = f" ({one.declined:,})" if one.kind == "setting" and one.declined else ""
    return Cell(f"{one.judged:,}{declined}", _colour(one))


def _colour(one: CoveredOut) -> str:
    from parity.tools.covered import missing

    return "over" if missing(one) else "" if one.judged else "soft"


def _never(found: Sequence[CoveredOut]) -> str:
    from parity.tools.covered import missing

    return f"{sum(map(missing, found)):,} of {len(found):,} never judged"


def _read(path: Path, title: str, read: Callable[[], list[Part] | None]) -> list[Part]:
    try:
        return read() or []
    except (UsageError, OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        return [Part(path.stem, title, f"{path} cannot be read: {type(error).__name__}: {error}")]


def scripts(summary: Summary, folder: Path) -> dict[str, str]:
    """Stand-alone scripts: of known findings those that were written, of new ones the first few."""
    out = {}
    for id in {str(f.known) for f in summary.known}:
        for path in (folder / "upstream" / id / "script.py", data.cases_dir() / "scripts" / f"{id}.py"):
            if path.exists():
                out[id] = path.read_text(encoding="utf-8")
                break
    for finding in summary.findings[:SCRIPTS]:
        if finding.lead.settings and (text := _script(finding)):
            out[finding.lead.replay] = text
    return out


def _script(finding: Finding) -> str:
    """The script of a new finding; "" where its implementation or its tensors cannot be put into one."""
    from parity.registry import load
    from parity.tools.issue.text import script_of

    lead: Row = finding.lead
    implementation = load().get(finding.implementation)
    if implementation is None or lead.seed is None:
        return ""
    case = Case(family=lead.family, seed=lead.seed, dtype=lead.dtype, settings=lead.settings)
    rows = [row for row in finding.rows if row.implementation == finding.implementation]
    if case.id != lead.case:
        return ""
    try:
        return script_of(case, implementation, rows, None)
    except Exception as error:  # the page must not fail for the sake of one script
        return f"# none could be written: {type(error).__name__}: {error}"


def audit(path: Path) -> Iterator[Part]:
    """Of each family which implementation honours which setting, from the rows of `parity audit`."""
    lines = path.read_text(encoding="utf-8").splitlines()
    answers = [one for line in lines if "answer" in (one := json.loads(line))]
    for family in dict.fromkeys(a["family"] for a in answers):
        of_family = [a for a in answers if a["family"] == family]
        names = list(dict.fromkeys(a["implementation"] for a in of_family))
        by = {(a["label"], a["implementation"]): a for a in of_family}
        rows = [
            [label, *(_answer(by.get((label, name))) for name in names)]
            for label in dict.fromkeys(a["label"] for a in of_family)
        ]
        bad = sum(a["answer"] in ("ignored", "wrong", "crashed") for a in of_family)
        note = f"{len(of_family):,} answers, {bad:,} of them ignored, wrong or crashed. Written by parity audit."
        table = Folded(f"{len(rows)} settings", ["setting", *names], rows)
        yield Part(f"audit-{family}", f"Settings audit: {family}", note, (), [table])


def _answer(one: dict[str, str | list[str]] | None) -> Cell:
    if one is None:
        return Cell("")
    bad = one["answer"] in ("ignored", "wrong", "crashed")
    known = ", ".join(one["known"]) if bad else ""
    style = ("known" if known else "over") if bad else "soft" if one["answer"] != "honoured" else "agree"
    return Cell(f"{one['answer']}: {known}" if known else str(one["answer"]), style)


def mutants(path: Path) -> Iterator[Part]:
    """Which deliberately wrong implementation is caught by which gate, from the rows of `parity mutants`."""
    from parity.selftest.mutants import table

    found = table.lines(table.read(path))
    rows = [[Cell(cell, "" if line.right else "over") for cell in line.cells()] for line in found]
    note = f"{table.summary(found)}. Written by parity mutants."
    folded = Folded(f"{len(rows)} mutants and controls", table.HEADINGS, rows)
    yield Part("mutants", "Mutants", note, (), [folded])


def benchmarks(path: Path) -> Iterator[Part]:
    """Time against memory, from the records of `make bench`."""
    from parity.tools.bench import report

    picture = report.plot(report.benchmarks(json.loads(path.read_text(encoding="utf-8"))["benchmarks"]))
    note = "Time and peak memory over those of parity.fixes, both logarithmic. Written by make bench."
    yield Part("benchmarks", "Benchmarks", note, (base64.b64encode(picture.encode()).decode(),))
