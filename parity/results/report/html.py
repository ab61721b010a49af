"""One self-contained HTML page: no script, no font, nothing fetched; light and dark, down to the width of a phone."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import jinja2

from parity.errors import UsageError
from parity.results import memory, trend
from parity.results.report import wording
from parity.results.report.findings import Finding, findings
from parity.results.report.outcomes import grouped, headroom
from parity.results.report.summary import Summary

BRIEF = 8
"""New findings named at the top of the page, with blame and since when; the rest is counted."""
STEEPEST = 100
"""Lines of the trend; nightly judges thousands of quantities."""
FOLDER = Path(__file__).with_name("page")


class Cell(str):
    """A cell of a table; `style` is its class in `page/style.css`."""

    style: str

    def __new__(cls, text: str, style: str = "") -> Cell:
        cell = super().__new__(cls, text)
        cell.style = style
        return cell


@dataclasses.dataclass(frozen=True)
class Folded:
    """A table under a line that opens it; the style of a `Cell` is its class in `page/style.css`."""

    summary: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclasses.dataclass(frozen=True)
class Part:
    """A section from what another command left beside the results.

    Attributes:
        id: of the heading.
        title: of the section.
        note: a sentence below it.
        pictures: SVG files in base64; shown as images, in which no script runs.
        tables: folded.
    """

    id: str
    title: str
    note: str = ""
    pictures: Sequence[str] = ()
    tables: Sequence[Folded] = ()


@dataclasses.dataclass(frozen=True)
class Extras:
    """What a page shows beside the rows.

    Attributes:
        code: exit code of the run.
        reasons: why it is not 0.
        scripts: stand-alone scripts, by ledger entry or, for a new finding, by replay line.
        parts: sections at the end.
        past: kept runs, the oldest first; where this run is among them the page says what changed.
    """

    code: int = 0
    reasons: Sequence[str] = ()
    scripts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    parts: Sequence[Part] = ()
    past: Sequence[memory.Run] = ()

    def this_run(self, summary: Summary) -> memory.Run | None:
        """The run among those that were kept."""
        return next((run for run in self.past if run.id == summary.run), None)

    def change(self, summary: Summary) -> trend.Change | None:
        """What changed since the runs before it; None for a run that was not kept."""
        this = self.this_run(summary)
        return trend.change(this, self.past) if this else None


def write(summary: Summary, path: str | Path, extras: Extras = Extras()) -> None:
    """Write the page."""
    Path(path).write_text(render(summary, extras), encoding="utf-8")


def render(summary: Summary, extras: Extras = Extras()) -> str:
    """The page. Everything that comes from rows and files is escaped."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(FOLDER),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    this, change = extras.this_run(summary), extras.change(summary)
    lines = trend.lines(this, extras.past) if this else None
    environment.globals.update(
        summary=summary,
        extras=extras,
        red=extras.code != 0,
        reasons=wording.others(extras.reasons),
        steepest=STEEPEST,
        verdict=wording.verdict(summary, extras.code),
        change=change,
        searched=[step.search_result for step in this.steps if step.search_result] if this else [],
        moved=change.moved if change else {},
        fixed=_fixed(change) if change else [],
        gone=_gone(change),
        growth=[_growth(g) for g in change.growth[:STEEPEST]] if change else [],
        trend=lines,
        seen=lambda finding: _seen(finding, change),
        since=lambda finding: _since(finding, change),
        brief=BRIEF,
        day=lambda run: f"{run.started:%Y-%m-%d}",
        scripts=extras.scripts,
        entries=len({f.known for f in summary.known}),
        devices=len({line.device for line in summary.lines}),
        families=list(dict.fromkeys(line.family for line in summary.lines)),
        errors=summary.errors,
        sections=_sections(summary, extras, change, lines),
        w=wording,
        headroom=headroom,
        bar=bar,
        judged=lambda finding: [r for r in finding.rows if r.judged],
        gates=wording.gates,
        gate=lambda value: math.inf if value is None else value,
    )
    return environment.get_template("page.html.j2").render()


def _sections(
    summary: Summary, extras: Extras, change: trend.Change | None, lines: trend.Trend | None
) -> list[tuple[str, str]]:
    """Id and title of every section that the page has, for the links at its top."""
    there = {
        ("new", "New"): summary.findings,
        ("fixed", "Fixed"): change and change.before and change.fixed,
        ("grew", "Grew"): change and change.before and change.growth,
        ("altered", "Known, but changed"): change and change.altered,
        ("known", "Known"): summary.known,
        ("matrix", "Matrix"): summary.grids,
        ("kl", "KL at step 1"): summary.step_one,
        ("errors", "Errors"): summary.errors,
        ("trend", "Trend"): lines,
        **{(p.id, p.title): True for p in extras.parts},
        ("implementations", "Every implementation"): True,
        ("coverage", "Coverage"): True,
        ("not-compared", "Not compared"): summary.reasons,
        ("versions", "Versions"): True,
    }
    return [section for section, present in there.items() if present]


def _seen(finding: Finding, change: trend.Change | None) -> str:
    """How often and since when, where runs were kept."""
    life = _life(finding, change)
    if life is None:
        return ""
    return f"in {life.times:,} of {wording.count(life.of, 'run')}, first {life.first.started:%Y-%m-%d}"


def _since(finding: Finding, change: trend.Change | None) -> str:
    life = _life(finding, change)
    return trend.since(life.first, change.run, "new in this run") if change and life else ""


def _life(finding: Finding, change: trend.Change | None) -> trend.Life | None:
    return change.lives.get(memory.key(finding)) if change and change.before else None


def _fixed(change: trend.Change) -> list[tuple[str, ...]]:
    then = {f.key: f for f in change.before.findings} if change.before else {}
    return [
        (
            f"{f.key} ({trend.STILL_FAILS})" if f.key in change.failing else f.key,
            f.cls or f.verdict,
            f.blame or "not decided",
            "∞" if f.headroom is None else wording.ratio(f.headroom),
            f.message,
            f"{change.lives[f.key].first.started:%Y-%m-%d}",
            f.replay,
        )
        for f in (then[key] for key in change.fixed)
    ]


def _gone(change: trend.Change | None) -> tuple[list[Finding], str]:
    """What is fixed, as the run before showed it, where that kept its rows; and why they cannot be read."""
    if change is None or change.before is None:
        return [], ""
    try:
        return [f for key in change.fixed for f in findings(grouped(memory.shown(change.before, key)))], ""
    except UsageError as error:
        return [], str(error)


def _growth(g: trend.Growth) -> tuple[str, ...]:
    now = "no finite size" if g.now is None else wording.ratio(g.now)
    where = g.dtype if g.device == "cpu" else f"{g.dtype} on {g.device}"
    return g.implementation, g.quantity, where, wording.ratio(g.before), now, g.case


def bar(value: float) -> int:
    """Width of a headroom bar in percent of the gate; what fails fills it."""
    return round(100 * min(max(value, 0.0), 1.0))
