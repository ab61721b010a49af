"""What a terminal shows of a run: one screen that opens with what is new and ends with the verdict and the next command; in full
every finding, table and reason."""

import collections
import dataclasses
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from parity.results.report import wording
from parity.results.report.failure import COLOURS, columns, plain, render_finding
from parity.results.report.findings import Finding, headroom
from parity.results.report.summary import DTYPES, Line, Summary
from parity.results.row import STOPPED
from parity.results.trend import Growth

LINES, WIDTH = 60, 110
"""What a summary may fill; wider terminals get no longer lines."""
MATRIX = 14
"""Lines that the table has in any case."""
NOTES = 5
"""Notes, of up to two lines each: new findings come first."""

Out = list[tuple[str, str]]
"""Lines and their styles."""


@dataclasses.dataclass(frozen=True)
class Ending:
    """How a run ended: exit code, why it is not 0, where its reports are, headrooms that grew, the steepest first."""

    code: int = 0
    reasons: Sequence[str] = ()
    folder: Path = Path("reports")
    grown: Sequence[Growth] = ()


IN_ORDER = Ending()


def render(summary: Summary, console: Console, ending: Ending = IN_ORDER) -> None:
    """Print the summary in at most `LINES` lines of at most the console's width; replay lines are never broken."""
    width = min(console.width, WIDTH)
    head, tail = _opening(summary, width), _closing(summary, width, ending)
    found = _findings(summary.findings, width, LINES - len(head) - len(tail) - MATRIX)
    show([*head, *found], console)
    _matrix(summary.lines, console, width, LINES - len(head) - len(tail) - len(found))
    show(tail, console)


def render_in_full(summary: Summary, console: Console, ending: Ending = IN_ORDER) -> None:
    """The same with every finding, every line of the table, what was not compared and why, and what was never exercised."""
    width = min(console.width, WIDTH)
    show(_opening(summary, width), console)
    show([(wording.counts(summary.counts), "")], console)
    for number, finding in enumerate(summary.findings, 1):
        show([("", ""), (f"new {number} · {finding.implementation} · {wording.title(finding)}", "bold red")], console)
        show([(wording.spread(finding), "")], console)
        render_finding(finding.rows, console)
    for finding in summary.known:
        said = (
            f"known {finding.known} · {finding.implementation} · {wording.title(finding)} · {wording.spread(finding)}"
        )
        show([("", ""), *_wrapped(said, width, style="yellow"), (finding.lead.replay, "dim")], console)
    _matrix(summary.lines, console, width, len(summary.lines) * 9)
    show([("", ""), ("not compared, and why", "bold")], console)
    for reason in summary.reasons:
        show(_wrapped(wording.reason(reason), width, "  "), console)
    show([("", ""), ("settings away from their default, in how many of the comparisons", "bold")], console)
    for one in summary.coverage:
        show(_wrapped(wording.coverage(one), width, "  "), console)
    show(_closing(summary, width, ending, notes=len(summary.notes)), console)


def show(lines: Out, console: Console) -> None:
    """Print lines as they are: the terminal may break one that is too long for it, this never does."""
    for text, style in lines:
        console.print(Text(plain(text.rstrip()), style=style), soft_wrap=True)


def _opening(summary: Summary, width: int) -> Out:
    """What is new, what is known, what was compared where; and that a run did not come to its end."""
    out = _wrapped(f"{wording.headline(summary)} · {wording.compared(summary)}", width, style="bold")
    if summary.incomplete:
        out += _wrapped(f"the run was {summary.incomplete}", width, style="yellow")
    return out


def _closing(summary: Summary, width: int, ending: Ending, notes: int = NOTES) -> Out:
    """Versions, reports, the verdict, why, what is new, what is known, and the next command to type."""
    new = collections.Counter(f.implementation for f in summary.findings)
    known = collections.Counter(str(f.known) for f in summary.known)
    why = wording.others(ending.reasons)
    more = [f"and {wording.count(len(summary.notes) - notes, 'more note')}: parity report -v"] * (
        len(summary.notes) > notes
    )
    parts = [("idle", _idle(summary), 1, "")]
    parts += [("note", note, 3, "yellow") for note in [*summary.notes[:notes], *more]]
    parts += [
        ("run", f"{wording.versions(summary)} · {wording.about(summary)}", 4, "dim"),
        ("page", f"{ending.folder}/index.html", 1, "dim"),
        ("verdict", wording.verdict(summary, ending.code), 2, "bold red" if ending.code else "bold green"),
        *(("", reason, 2, "") for reason in why[:4]),
        ("", f"and {len(why) - 4} more reasons" if len(why) > 4 else "", 1, ""),
        ("new", _counted(new) or "none", 2, "bold red" if new else ""),
        ("known", _counted(known) or "none", 3, ""),
        ("grew", "; ".join(map(_grew, ending.grown)), 2, "yellow"),
    ]
    out: Out = [("", "")]
    for label, text, most, style in parts:
        lines = _wrapped(text, width, " " * 9, most, style) if text else []
        out += [(f"{label:<9}{line[9:]}" if not number else line, style) for number, (line, _) in enumerate(lines)]
    replay = next((f.lead.replay for f in summary.findings if f.lead.replay), "")
    compared = any(summary.compared.values())
    again = f"parity report {ending.folder / 'results.ndjson'} -v" if compared else "parity doctor"
    return [*out, (f"{'next':<9}{replay or again}", "bold")]


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


def _matrix(lines: Sequence[Line], console: Console, width: int, room: int) -> None:
    """Worst headroom by implementation and dtype: what fails first, then the tightest; the rest is counted."""
    groups: dict[tuple[str, str, str], dict[str, Line]] = {}
    for line in lines:
        groups.setdefault((line.family, line.implementation, line.device), {})[line.dtype] = line
    busy = {k: v for k, v in groups.items() if any(x.counts["compared"] or x.verdict in STOPPED for x in v.values())}
    if not busy:
        return
    order = sorted(busy, key=lambda k: _rank(busy[k].values()), reverse=True)
    kept = len(order)
    while kept > 1 and len(console.render_lines(_table(busy, order[:kept], width), pad=False)) > room - 3:
        kept -= 1
    show([("", ""), ("worst headroom = error ÷ allowed; ! new, above 1 fails; (known finding)", "dim")], console)
    console.print(_table(busy, order[:kept], width))
    if rest := order[kept:]:
        most = wording.ratio(max(_rank(busy[k].values())[2] for k in rest))
        known = ", unless known" if any(x.known for k in rest for x in busy[k].values()) else ""
        others = wording.count(len(rest), "implementation")
        show([(f"  and {others} with at most {most}{known}: parity report -v", "dim")], console)


def _table(
    busy: dict[tuple[str, str, str], dict[str, Line]], kept: Sequence[tuple[str, str, str]], width: int
) -> Table:
    dtypes = sorted({d for v in busy.values() for d in v}, key=lambda d: (d not in DTYPES, d and DTYPES.index(d)))
    many = len({device for _, _, device in busy}) > 1
    table = columns()
    table.width = None if width >= 100 else width
    table.add_column("", overflow="fold")
    for name in (*dtypes, "compared", "known"):
        table.add_column(name, justify="right", no_wrap=True, min_width=7)
    for family in dict.fromkeys(k[0] for k in busy if k in kept):
        table.add_row(Text(family, style="bold"))
        for key in (k for k in busy if k[0] == family and k in kept):
            found = busy[key]
            cells = [_cell(found[d]) if d in found else "" for d in dtypes]
            known = {i for x in found.values() for i in x.known}
            cells += [f"{sum(x.counts['compared'] for x in found.values()):,}", f"{len(known) or ''}"]
            name = f"  {key[1]} ({key[2]})" if many else f"  {key[1]}"
            table.add_row(Text(name), *cells, style=_style(found.values()))
    return table


def _rank(found: Iterable[Line]) -> tuple[bool, bool, float]:
    lines = list(found)
    fresh = [headroom(x.worst) for x in lines if x.worst and not x.worst.known]
    return any(x.new for x in lines), bool(fresh), max(fresh, default=0.0)


def _style(found: Iterable[Line]) -> str:
    lines = list(found)
    return "bold red" if any(x.new for x in lines) else COLOURS["known"] if any(x.known for x in lines) else ""


def _cell(line: Line) -> str:
    """Headroom; ! where it is new, in brackets where all that was judged is a known finding."""
    if line.verdict in STOPPED:
        return {"crashed": "crash!", "timed-out": "hung!", "out-of-memory": "memory!"}[line.verdict]
    if line.worst is None:
        return "·"
    size = wording.ratio(headroom(line.worst))
    return f"({size})" if line.worst.known else f"{size}!" if line.worst.new else size


def _idle(summary: Summary) -> str:
    """The implementations that compared nothing, in one line: how many, and why."""
    busy = {x.implementation for x in summary.lines if x.counts["compared"] or x.verdict in STOPPED}
    idle = {x.implementation: x.reason for x in summary.lines if x.implementation not in busy}
    why = "; ".join(f"{n}: {reason}" for reason, n in collections.Counter(idle.values()).most_common())
    return f"{wording.count(len(idle), 'implementation')} compared nothing ({why})" if idle else ""


def _grew(g: Growth) -> str:
    now = "no finite size" if g.now is None else wording.ratio(g.now)
    return f"{g.implementation} {g.quantity} {g.dtype}: {wording.ratio(g.before)} to {now}"


def _counted(found: collections.Counter[str]) -> str:
    return ", ".join(f"{name} ({n})" if n > 1 else name for name, n in found.most_common())


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
