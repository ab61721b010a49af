"""One self-contained HTML page: no script, no font, nothing fetched; light and dark, down to the width of a phone."""

from collections.abc import Sequence
from pathlib import Path

from parity.results import memory, trend
from parity.results.report import wording
from parity.results.report.findings import Finding, findings, grouped
from parity.results.report.markdown import filled
from parity.results.report.summary import Summary


def write(
    summary: Summary, path: str | Path, code: int = 0, reasons: Sequence[str] = (), past: Sequence[memory.Run] = ()
) -> None:
    """Write the page."""
    Path(path).write_text(render(summary, code, reasons, past), encoding="utf-8")


def render(summary: Summary, code: int = 0, reasons: Sequence[str] = (), past: Sequence[memory.Run] = ()) -> str:
    """The page, all that comes from rows escaped. `past`: kept runs; where this run is among them, it says what changed."""
    change = trend.of(summary.run, past)
    values = {"summary": summary, "code": code, "reasons": wording.others(reasons), "change": change}
    return filled("page.html.j2", **values, gone=_gone(change), since=lambda finding: _since(finding, change))


def _since(finding: Finding, change: trend.Change | None) -> str:
    """Since when, and how often, where runs were kept."""
    if change is None or change.before is None:
        return ""
    life = change.lives[finding.key]
    often = f"in {life.times:,} of {wording.count(life.of, 'run')}"
    return f"{trend.since(life.first, change.run, 'new in this run')}, {often}"


def _gone(change: trend.Change | None) -> list[tuple[str, Finding | None]]:
    """What is fixed, each as the run before showed it, where that kept its rows."""
    if change is None or change.before is None:
        return []
    then = {f.key: f for f in change.before.findings}
    out: list[tuple[str, Finding | None]] = []
    for key in change.fixed:
        label = f"{key} ({trend.STILL_FAILS})" if key in change.failing else key
        out.append((label, next(iter(findings(grouped(then[key].rows))), None)))
    return out
