"""The terminal summary: one screen that opens with what is new and ends with the verdict and the next command."""

import collections
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from parity.results.report import wording
from parity.results.report.failure import COLOURS, plain
from parity.results.report.findings import Finding
from parity.results.report.outcomes import headroom
from parity.results.report.summary import DTYPES, Line, Summary
from parity.results.row import STOPPED
from parity.results.trend import Growth

LINES = 60
"""What a summary may fill."""
MATRIX = 14
"""Lines that the matrix has in any case."""
KNOWN = 3
"""Lines for known findings; all are in `parity report -v` and in the page."""
NOTES = 5
"""Notes, of up to two lines each: new findings come first."""
WIDTH = 110
"""The widest layout: wider terminals get no longer lines."""

Out = list[tuple[str, str]]
"""Lines and their styles."""


def render(
    summary: Summary,
    console: Console,
    code: int = 0,
    reasons: Sequence[str] = (),
    folder: Path = Path("reports"),
    grown: Sequence[Growth] = (),
) -> None:
    """Print the summary in at most `LINES` lines of at most the console's width; replay lines are never broken.

    `code` and `reasons` are the exit code and why it is not 0, `folder` is where the reports are, `grown` are headrooms that
    grew since earlier runs, the steepest first.
    """
    width = min(console.width, WIDTH)
    head = opening(summary, width)
    tail = closing(summary, width, code, reasons, folder, grown)
    found = _findings(summary.findings, width, LINES - len(head) - len(tail) - MATRIX)
    matrix = _matrix(summary.lines, width, LINES - len(head) - len(tail) - len(found))
    show([*head, *found, *matrix, *tail], console)


def show(lines: Out, console: Console) -> None:
    """Print lines as they are: the terminal may break one that is too long for it, this never does."""
    for text, style in lines:
        console.print(Text(plain(text.rstrip()), style=style), soft_wrap=True)


def opening(summary: Summary, width: int) -> Out:
    """What is new, what is known, what was compared where; and that a run did not come to its end."""
    out = _wrapped(f"{wording.headline(summary)} · {wording.compared(summary)}", width)
    if summary.incomplete:
        out += _wrapped(f"the run was {summary.incomplete}", width, style="yellow")
    return [(text, style or "bold") for text, style in out]


def closing(
    summary: Summary, width: int, code: int, reasons: Sequence[str], folder: Path, grown: Sequence[Growth] = ()
) -> Out:
    """Versions, reports, the verdict, why, what is new, what is known, and the next command to type."""
    out: Out = [("", "")]
    out += _labelled("idle", _idle(summary), width, 1)
    notes = [*wording.imported(summary), *(wording.unjudged(*u) for u in summary.unjudged)]
    notes += map(wording.openings, summary.openings)
    for note in notes[:NOTES]:
        out += _labelled("note", note, width, 2, "yellow")
    if len(notes) > NOTES:
        more = f"and {wording.count(len(notes) - NOTES, 'more note')}: parity report -v"
        out += _labelled("note", more, width, 1, "yellow")
    out += _labelled("run", f"{wording.versions(summary)} · {wording.about(summary)}", width, 4, "dim")
    out += _labelled("page", f"{folder}/index.html", width, 1, "dim")
    style = "bold green" if code == 0 else "bold red"
    out += _labelled("verdict", wording.verdict(summary, code), width, 2, style)
    why = wording.others(reasons)
    for reason in why[:4]:
        out += _labelled("", reason, width, 2)
    if len(why) > 4:
        out += _labelled("", f"and {len(why) - 4} more reasons", width, 1)
    new = collections.Counter(f.implementation for f in summary.findings)
    out += _labelled("new", _counted(new) or "none", width, 2, "bold red" if new else "")
    known = collections.Counter(str(f.known) for f in summary.known)
    out += _labelled("known", _counted(known) or "none", width, KNOWN)
    out += _labelled("grew", "; ".join(map(_grew, grown)), width, 2, "yellow")
    out.append((f"{'next':<9}{_next(summary, folder)}", "bold"))
    return out


def _next(summary: Summary, folder: Path) -> str:
    lead = next((f.lead for f in summary.findings if f.lead.replay), None)
    if lead is not None:
        return lead.replay
    compared = any(summary.compared.values())
    return f"parity report {folder / 'results.ndjson'} -v" if compared else "parity doctor"


def _findings(found: Sequence[Finding], width: int, room: int) -> Out:
    """The new findings that there is room for, the gravest first, each with its replay line."""
    out: Out = []
    for number, finding in enumerate(found, 1):
        lead = finding.lead
        title = f"new {number} · {finding.implementation} · {wording.title(finding)}"
        one = [("", ""), *_wrapped(title, width, "", 3, "bold red")]
        one += _wrapped(f"wrong: {wording.wrong(lead)} · {wording.spread(finding)}", width, "  ", 2)
        one += _wrapped(lead.message, width, "  ", 2)
        one.append((f"  {lead.replay}", "dim"))
        if len(out) + len(one) > room - 1:
            out.append((f"and {wording.count(len(found) - number + 1, 'more new finding')}: parity report -v", "bold"))
            return out
        out += one
    return out


def _matrix(lines: Sequence[Line], width: int, room: int) -> Out:
    """Worst headroom by implementation and dtype: what fails first, then the tightest; the rest is counted."""
    groups: dict[tuple[str, str, str], dict[str, Line]] = {}
    for line in lines:
        groups.setdefault((line.family, line.implementation, line.device), {})[line.dtype] = line
    busy = {k: v for k, v in groups.items() if any(x.counts.compared or x.verdict in STOPPED for x in v.values())}
    if not busy:
        return []
    dtypes = sorted({d for v in busy.values() for d in v}, key=lambda d: (d not in DTYPES, d and DTYPES.index(d)))
    order = sorted(busy, key=lambda k: _rank(busy[k].values()), reverse=True)
    families = list(dict.fromkeys(k[0] for k in busy))
    kept = order[: max(room - 4 - len({k[0] for k in order}), 1)]
    rest = [k for k in order if k not in kept]
    shown = [k for name in families for k in busy if k[0] == name and k in kept]
    many = len({k[2] for k in busy}) > 1
    names = {k: f"  {k[1]} ({k[2]})" if many else f"  {k[1]}" for k in busy}
    numbers = 8 * len(dtypes) + 15
    wide = min(max(len(names[k]) for k in shown), max(width - numbers, 20))
    out: Out = [("", ""), ("worst headroom = error ÷ allowed; ! new, above 1 fails; (known finding)", "dim")]
    heading = "".join(f"{d:>8}" for d in dtypes) + f"{'compared':>9}{'known':>6}"
    for name in dict.fromkeys(k[0] for k in shown):
        out.append((f"{name:<{wide}}{heading}" if len(name) <= wide else name, "bold"))
        heading = ""
        for k in (k for k in shown if k[0] == name):
            found = busy[k]
            cells = "".join(f"{_cell(found[d]) if d in found else '':>8}" for d in dtypes)
            ids = {i for x in found.values() for i in x.known}
            cells += f"{sum(x.counts.compared for x in found.values()):>9,}{len(ids) or '':>6}"
            style = _style(found.values())
            if len(names[k]) > wide:
                out += [(names[k], style), (" " * wide + cells, style)]
            else:
                out.append((f"{names[k]:<{wide}}{cells}", style))
    if rest:
        worst = wording.capped(max(_rank(busy[k].values())[2] for k in rest))
        known = ", unless known" if any(x.known for k in rest for x in busy[k].values()) else ""
        others = wording.count(len(rest), "implementation")
        out.append((f"  and {others} with at most {worst}{known}: parity report -v", "dim"))
    return out


def _rank(found: Iterable[Line]) -> tuple[bool, bool, float]:
    lines = list(found)
    bad = any(x.verdict not in ("agree", "known", *wording.NOTHING) for x in lines)
    fresh = [headroom(x.worst) for x in lines if x.worst and not x.worst.known]
    return bad, bool(fresh), max(fresh, default=0.0)


def _style(found: Iterable[Line]) -> str:
    verdicts = {x.verdict for x in found} - set(wording.NOTHING)
    bad = verdicts - {"agree", "known"}
    return "bold red" if bad else COLOURS["known"] if "known" in verdicts else ""


def _cell(line: Line) -> str:
    """Headroom; ! where it is new, in brackets where all that was judged is a known finding."""
    if line.verdict in STOPPED:
        return {"crashed": "crash!", "timed-out": "hung!", "out-of-memory": "memory!"}[line.verdict]
    if line.worst is None:
        return "·"
    size = wording.capped(headroom(line.worst))
    return f"({size})" if line.worst.known else f"{size}!" if line.worst.new else size


def _idle(summary: Summary) -> str:
    """The implementations that compared nothing, in one line: how many, and why."""
    by: dict[str, list[Line]] = {}
    for line in summary.lines:
        by.setdefault(line.implementation, []).append(line)
    idle = {
        name: max(v, key=lambda x: x.counts.total).reason
        for name, v in by.items()
        if not any(x.counts.compared or x.verdict in STOPPED for x in v)
    }
    if not idle:
        return ""
    why = collections.Counter(idle.values())
    if len(idle) <= 2:
        return "; ".join(f"{name}: {reason}" for name, reason in idle.items())
    grouped = "; ".join(f"{n}: {reason}" for reason, n in why.most_common())
    return f"{wording.count(len(idle), 'implementation')} compared nothing ({grouped})"


def _grew(g: Growth) -> str:
    now = "no finite size" if g.now is None else wording.capped(g.now)
    return f"{g.implementation} {g.quantity} {g.dtype}: {wording.capped(g.before)} to {now}"


def _counted(found: collections.Counter[str]) -> str:
    return ", ".join(f"{name} ({n})" if n > 1 else name for name, n in found.most_common())


def _labelled(label: str, text: str, width: int, most: int, style: str = "") -> Out:
    if not text:
        return []
    out = _wrapped(text, width, " " * 9, most, style)
    return [(f"{label:<9}{out[0][0][9:]}", style), *out[1:]]


def _wrapped(text: str, width: int, indent: str = "", most: int = 0, style: str = "") -> Out:
    """Lines that break between words alone; what does not fit into `most` ends in …."""
    lines = textwrap.wrap(
        " ".join(text.split()),
        width,
        initial_indent=indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
        max_lines=most or None,
        placeholder=" …",
    )
    return [(line, style) for line in lines]
