"""A Markdown summary, short enough for a comment on a pull request (GitHub refuses 65,536 characters)."""

import html
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from parity.results.report import measured, wording
from parity.results.report.failure import text_of
from parity.results.report.findings import Finding
from parity.results.report.outcomes import headroom
from parity.results.report.summary import Line, Summary

LIMIT = 60_000
IN_FULL = 8
LISTED = 60
REASONS = 12

_SPECIAL = re.compile(r"([\\`*_\[\]|~])")


def write(summary: Summary, path: str | Path, exit_code: int | None = None, reasons: Sequence[str] = ()) -> None:
    """Write the Markdown file."""
    Path(path).write_text(render(summary, exit_code, reasons), encoding="utf-8")


def render(summary: Summary, exit_code: int | None = None, reasons: Sequence[str] = ()) -> str:
    """How it ended and why, counts, table, findings, coverage; findings beyond what fits are counted, never dropped."""
    full = IN_FULL
    while True:
        text = _render(summary, full, exit_code, reasons)
        if len(text) <= LIMIT or full == 0:
            return text
        full //= 2


def _render(summary: Summary, full: int, exit_code: int | None, reasons: Sequence[str]) -> str:
    out = [
        f"## Numerical parity: {wording.headline(summary)}",
        "",
        f"**{escape(' · '.join(wording.counts(summary.counts)))}**",
        "",
    ]
    out += [escape(f"{summary.counts.total:,} implementation-cases: {wording.outcome(summary)}."), ""]
    if exit_code is not None:
        out += [escape(f"{wording.verdict(summary, exit_code).capitalize()}."), ""]
    if why := wording.others(reasons):
        out += [*(f"- {escape(reason)}" for reason in why[:LISTED]), ""]
    if summary.incomplete:
        out += [f"**The run was {summary.incomplete}.**", ""]
    out += _table(summary.lines)
    if summary.findings:
        out += ["### New findings", ""]
        if drawn := wording.as_drawn(summary):
            out += [drawn, ""]
        for number, finding in enumerate(summary.findings[:LISTED], 1):
            out += _finding(f"{number}.", finding, number <= full)
        out += _more(summary.findings)
    if summary.known:
        out += ["### Known findings", ""]
        for finding in summary.known[:LISTED]:
            out += _finding(f"- {code(finding.known or '')}", finding, False)
        out += _more(summary.known)
    out += _coverage(summary)
    out += [f"<sub>{escape(wording.about(summary))}<br>{escape(wording.versions(summary))}</sub>", ""]
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
    rows = []
    device = {line.device for line in lines}
    for line in lines:
        where = f"{line.dtype} ({line.device})" if len(device) > 1 else line.dtype
        verdict = wording.line_verdict(line)
        cells = [
            escape(line.family),
            code(line.implementation),
            escape(where),
            f"{line.counts.compared:,}",
            f"{line.counts.unsupported + line.counts.refused:,}",
            wording.line_headroom(line),
            escape(wording.at(line.worst)),
            escape(f"{verdict}: {line.reason}" if line.verdict in ("refused", "unsupported") else verdict),
        ]
        rows.append(cells)
    heads = ["family", "implementation", "dtype", ">compared", ">unsupported", ">worst headroom", "at", "verdict"]
    return [*measured.table(heads, rows), ""]


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


def _coverage(summary: Summary) -> list[str]:
    out = ["### Coverage", ""]
    for found in summary.coverage:
        met = [f"{d.name} {wording.percent(d.share)}" for d in reversed(found.dimensions) if d.exercised]
        never = [d.name for d in found.unexercised]
        head = (
            f"{found.family}: {found.compared:,} implementation-cases compared, {found.pairs - len(found.never):,} of "
        )
        out += [f"- {escape(head + f'{found.pairs:,} pairs of dimensions met')}"]
        out += [f"  - away from the default: {escape(', '.join(met) or 'nothing')}"]
        out += [f"  - never: {escape(', '.join(never) or 'none')}"]
        for name, own in summary.takers.items():
            if own.family == found.family and own.never:
                lacking = ", ".join(f"{a} + {b}" for a, b in own.never)
                out += [f"  - {escape(f'{name}, never together: {lacking}')}"]
    out += _reasons(summary)
    return [*out, ""]


def _reasons(summary: Summary) -> Iterable[str]:
    for reason in summary.reasons[:REASONS]:
        share = f"{reason.verdict}, {wording.percent(reason.share)}"
        yield "- " + escape(f"{share}: {reason.message} ({wording.who(reason)})")
    if len(summary.reasons) > REASONS:
        yield f"- and {len(summary.reasons) - REASONS} more reasons"
