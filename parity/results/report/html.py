"""One self-contained HTML page: no script, no font, nothing fetched."""

from __future__ import annotations

import math
from pathlib import Path

import jinja2

from parity.results.report import wording
from parity.results.report.outcomes import headroom
from parity.results.report.summary import Line, Summary, Tally
from parity.results.row import Row

TEMPLATE = Path(__file__).with_name("template.html.j2")


def write(summary: Summary, path: str | Path) -> None:
    """Write the page."""
    Path(path).write_text(render(summary), encoding="utf-8")


def render(summary: Summary) -> str:
    """The page. Everything that comes from rows is escaped."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    return template.render(
        summary=summary,
        families=list(dict.fromkeys(line.family for line in summary.lines)),
        tallies={
            (line.implementation, line.family, line.dtype, line.device): _tallies(summary, line)
            for line in summary.lines
        },
        w=wording,
        headroom=headroom,
        bar=bar,
        judged=lambda finding: [r for r in finding.rows if r.judged],
        gates=_gates,
        gate=lambda value: math.inf if value is None else value,
    )


def bar(value: float) -> int:
    """Width of a headroom bar in percent of the gate; what fails fills it."""
    return round(100 * min(max(value, 0.0), 1.0))


def _tallies(summary: Summary, line: Line) -> list[Tally]:
    key = line.implementation, line.family, line.dtype, line.device
    return [t for t in summary.tallies if (t.implementation, t.family, t.dtype, t.device) == key]


def _gates(rows: list[Row]) -> list[str]:
    return list(dict.fromkeys(g for r in rows for g in r.gates))
