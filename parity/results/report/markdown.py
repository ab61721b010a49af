"""A Markdown summary, short enough for a comment on a pull request (GitHub refuses 65,536 characters)."""

import html
import re
from collections.abc import Sequence
from pathlib import Path

from parity.results.report import measured, wording
from parity.results.report.failure import text_of
from parity.results.report.findings import Finding, headroom
from parity.results.report.summary import Line, Summary

LIMIT = 60_000
IN_FULL = 8
LISTED = 60
REASONS = 12

_SPECIAL = re.compile(r"([\\`*_\[\]|~])")


def write(summary: Summary, path: str | Path, exit_code: int = 0, reasons: Sequence[str] = ()) -> None:
    """Write the Markdown file."""
    Path(path).write_text(render(summary, exit_code, reasons), encoding="utf-8")


def render(summary: Summary, exit_code: int = 0, reasons: Sequence[str] = ()) -> str:
    """How it ended and why, findings, table, coverage; findings beyond what fits are counted, never dropped."""
    full = IN_FULL
    while True:
        text = _render(summary, full, exit_code, reasons)
        if len(text) <= LIMIT or full == 0:
            return text
        full //= 2


def _render(summary: Summary, full: int, exit_code: int, reasons: Sequence[str]) -> str:
    out = [f"## Numerical parity: {wording.headline(summary)}", ""]
    out += [
        f"**{escape(wording.verdict(summary, exit_code).capitalize())}.** {escape(wording.counts(summary.counts))}."
    ]
    out += ["", *(f"- {escape(reason)}" for reason in wording.others(reasons)[:LISTED]), ""]
    if summary.incomplete:
        out += [f"**The run was {summary.incomplete}.**", ""]
    if summary.findings:
        out += ["### New findings", ""]
        for number, finding in enumerate(summary.findings[:LISTED], 1):
            out += _finding(f"{number}.", finding, number <= full)
        out += _more(summary.findings)
    if summary.known:
        out += ["### Known findings", ""]
        for finding in summary.known[:LISTED]:
            out += _finding(f"- {code(finding.known or '')}", finding, False)
        out += _more(summary.known)
    out += ["### Every implementation", "", *_table(summary.lines), ""]
    out += ["### Coverage", "", *(f"- {escape(wording.coverage(one))}" for one in summary.coverage)]
    out += [f"- {escape(wording.reason(reason))}" for reason in summary.reasons[:REASONS]]
    if len(summary.reasons) > REASONS:
        out.append(f"- and {len(summary.reasons) - REASONS} more reasons")
    out += ["", f"<sub>{escape(wording.about(summary))}<br>{escape(wording.versions(summary))}</sub>", ""]
    return "\n".join(out)


def escape(text: str) -> str:
    """Text that Markdown and HTML show as it stands, on one line and in one table cell."""
    return _SPECIAL.sub(r"\\\1", html.escape(" ".join(text.split()), quote=False))


def code(text: str) -> str:
    """An id in code style, whatever it contains."""
    text = " ".join(text.split()).replace("|", "\\|")
    ticks = "`" * (max((len(t) for t in re.findall(r"`+", text)), default=0) + 1)
    pad = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{ticks}{pad}{text}{pad}{ticks}"


def _table(lines: Sequence[Line]) -> list[str]:
    rows = (
        [
            escape(line.family),
            code(line.implementation),
            escape(f"{line.dtype} ({line.device})"),
            f"{line.counts['compared']:,}",
            f"{line.counts['unsupported'] + line.counts['refused']:,}",
            "" if line.worst is None else wording.ratio(headroom(line.worst)),
            escape(wording.at(line.worst)),
            escape(wording.verdict_of(line)),
        ]
        for line in lines
    )
    heads = ["family", "implementation", "dtype", ">compared", ">declined", ">worst headroom", "at", "verdict"]
    return measured.table(heads, rows)


def _finding(mark: str, finding: Finding, full: bool) -> list[str]:
    lead = finding.lead
    head = f"{mark} **{escape(wording.title(finding))}** · {code(finding.implementation)}"
    size = "" if not finding.roots else f", headroom {wording.ratio(headroom(lead))} at {wording.at(lead)}"
    parts = [f"wrong: {wording.wrong(lead)}{size}", wording.spread(finding), lead.message]
    out = [head, *(f"   <br>{escape(t)}" for t in parts if t)]
    if lead.replay:
        out.append(f"   <br>{code(lead.replay)}")
    if full:
        fence = "`" * 4
        body = text_of(finding.rows).replace(fence, "'" * 4)
        out += ["", f"   <details><summary>{html.escape(lead.case)}</summary>", "", f"   {fence}text"]
        out += [f"   {line}".rstrip() for line in body.splitlines()]
        out += [f"   {fence}", "", "   </details>"]
    return [*out, ""]


def _more(found: Sequence[Finding]) -> list[str]:
    return [f"… and {len(found) - LISTED} more.", ""] if len(found) > LISTED else []
