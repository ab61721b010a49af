"""Everything of a run on a terminal (`-v`): 80 columns and up, complete without colour. The one screen of it: `brief`."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from rich.console import Console
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from parity.results.report import wording
from parity.results.report.coverage import Coverage
from parity.results.report.failure import COLOURS, columns, render_finding, say
from parity.results.report.findings import Finding
from parity.results.report.summary import Counts, Line, Summary

__all__ = ["render", "render_finding"]

IN_FULL = 10
"""New findings printed in full; the others get three lines each and are in full in the HTML report."""
REASONS = 10
PAIRS = 12


def render(summary: Summary, console: Console) -> None:
    """Print counts, tables, new findings in full, known findings and coverage."""
    say(console, " · ".join(wording.counts(summary.counts)))
    for family in dict.fromkeys(line.family for line in summary.lines):
        console.print()
        _table(family, [line for line in summary.lines if line.family == family], console)
    for line in wording.imported(summary):
        say(console, line, "yellow")
    for who, names in summary.unjudged:
        say(console, wording.unjudged(who, names), "yellow")
    if summary.findings:
        console.print()
        console.print(Rule("New findings", align="left", style="red"))
        if line := wording.as_drawn(summary):
            say(console, line)
        for number, finding in enumerate(summary.findings, 1):
            console.print()
            _finding_in_summary(number, finding, console, full=number <= IN_FULL)
    if summary.known:
        console.print()
        console.print(Rule("Known findings", align="left", style="yellow"))
        for number, finding in enumerate(summary.known, 1):
            _finding_in_summary(number, finding, console, full=False)
    console.print()
    console.print(Rule("Coverage", align="left", style="dim"))
    _coverage(summary, console)


def _table(family: str, lines: Sequence[Line], console: Console) -> None:
    """A table. Names that do not fit beside the numbers get a line of their own; none is cut.

    Below it which known findings each implementation has, and why some were not compared.
    """
    devices = sorted({line.device for line in lines})
    counters: Mapping[str, Callable[[Counts], int]] = {
        "compared": lambda c: c.compared,
        "unsupp.": lambda c: c.unsupported,
        "refused": lambda c: c.refused,
        "stopped": lambda c: c.crashed + c.timed_out + c.out_of_memory,
    }
    shown = {k: f for k, f in counters.items() if k == "compared" or any(f(line.counts) for line in lines)}
    groups: dict[str, list[Line]] = {}
    for line in lines:
        name = line.implementation if len(devices) == 1 else f"{line.implementation} ({line.device})"
        groups.setdefault(name, []).append(line)
    longest = max(map(len, groups))
    beside = longest + sum(len(k) + 2 for k in shown) + 50 <= console.width
    console.print(Text(f"{family} · {', '.join(devices)}", style="bold"))
    table = _numbers(shown, longest if beside else 0)
    for name, found in groups.items():
        for k, cells in enumerate(_cells(found, list(shown.values()))):
            table.add_row(Text(name if beside and k == 0 else ""), *cells)
        if not beside:
            say(console, name)
            console.print(table)
            table = _numbers(shown, 0, header=False)
    if beside:
        console.print(table)
    for name, found in groups.items():
        if known := sorted({id for line in found for id in line.known}):
            say(console, f"  known in {name}: {', '.join(known)}", "dim")
    idle = dict.fromkeys(
        (n, x.reason) for n, found in groups.items() for x in found if not x.counts.compared and x.reason
    )
    for name, reason in idle:
        say(console, f"  {name}: {reason}", "dim")


def _cells(found: Sequence[Line], counters: Sequence[Callable[[Counts], int]]) -> Iterator[list[str | Text]]:
    """The cells beside an implementation's name: a row for each dtype, or one row where nothing could run."""
    if len(found) > 1 and all(line.verdict == "unsupported" for line in found):
        totals = [f"{sum(f(line.counts) for line in found):,}" for f in counters]
        yield ["all", *totals, "", "", Text("unsupported", style=COLOURS.get("unsupported", ""))]
        return
    for line in found:
        verdict = Text(wording.line_verdict(line, ids=False), style=COLOURS.get(line.verdict, "bold red"))
        counts = [f"{f(line.counts):,}" for f in counters]
        yield [line.dtype, *counts, wording.line_headroom(line), Text(wording.at(line.worst)), verdict]


def _numbers(counters: Iterable[str], longest: int, header: bool = True) -> Table:
    table = columns("", "bold")
    table.show_header = header
    table.add_column("implementation" if longest else "", no_wrap=True, width=longest or 1)
    table.add_column("dtype", no_wrap=True, width=5)
    for heading in (*counters, "headroom"):
        table.add_column(heading, justify="right", no_wrap=True, width=len(heading))
    table.add_column("at", overflow="fold", width=20 if longest else 16)
    table.add_column("verdict", overflow="fold", min_width=8)
    return table


def _which(finding: Finding) -> str:
    return "; the smallest of those drawn:" if finding.minimised is False else "; the smallest:"


def _finding_in_summary(number: int, finding: Finding, console: Console, full: bool) -> None:
    mark = f"known {finding.known}" if finding.known else f"new {number}"
    say(console, f"{mark} · {finding.implementation} · {wording.title(finding)}", "bold" if full else "")
    say(console, f"  {wording.spread(finding)}{_which(finding) if full else ''}")
    if full:
        render_finding(finding.rows, console)
        return
    if finding.lead.message:
        say(console, f"  {finding.lead.message}")
    if finding.lead.replay:
        console.print(Text(f"  {finding.lead.replay}", style="dim"), soft_wrap=True)


def _coverage(summary: Summary, console: Console) -> None:
    for found in summary.coverage:
        say(
            console,
            f"{found.family}: share of {found.compared:,} compared implementation-cases away from each default",
            "bold",
        )
        met = [d for d in reversed(found.dimensions) if d.exercised]
        say(console, "  " + " · ".join(f"{d.name} {wording.percent(d.share)}" for d in met))
        say(console, f"  never: {_never(found)}", "yellow" if found.unexercised else "")
        say(console, f"  pairs: {found.pairs - len(found.never):,} of {found.pairs:,} met{_pairs(found)}")
        for name, own in summary.takers.items():
            if own.family == found.family and own.never:
                share = f"{own.pairs - len(own.never):,} of {own.pairs:,}"
                say(console, f"    {name}: {share} of what it takes{_pairs(own)}", "dim")
    if summary.undecided:
        say(
            console,
            f"{summary.undecided:,} entries undecided: correct rounding alone can change them, or a replica overflows",
            "dim",
        )
    for opening in summary.openings:
        say(console, wording.openings(opening), "yellow")
    for verdict in ("unsupported", "refused"):
        reasons = [r for r in summary.reasons if r.verdict == verdict]
        if reasons:
            say(console, f"{verdict}, by reason:", "bold")
        for reason in reasons[:REASONS]:
            say(console, f"  {wording.percent(reason.share):>5}  {reason.message} ({wording.who(reason)})")
        if len(reasons) > REASONS:
            say(console, f"         and {len(reasons) - REASONS} more reasons (all in the HTML report)", "dim")


def _never(found: Coverage) -> str:
    return (
        ", ".join(f"{d.name} ({d.drawn:,} drawn, none compared)" if d.drawn else d.name for d in found.unexercised)
        or "none"
    )


def _pairs(found: Coverage) -> str:
    apart = f", {len(found.apart)} more do not go together" if found.apart else ""
    if not found.never:
        return apart
    text = ", ".join(f"{a} + {b}" for a, b in found.never[:PAIRS])
    return f"{apart}; never together: {text}" + (
        f" and {len(found.never) - PAIRS} more" if len(found.never) > PAIRS else ""
    )
