"""What a run writes and prints at its end; tables, and that of known findings, which imports no torch."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.table import Table
from rich.text import Text

from parity.cli.group import console
from parity.results.row import Header, Row

if TYPE_CHECKING:
    from parity.results.report.stack import Stack

VERBOSE = click.option("-v", "--verbose", is_flag=True, help="print every table and finding")


def report(
    header: Header,
    rows: list[Row],
    results: Path,
    folder: Path,
    reasons: list[str],
    code: int,
    verbose: bool | None = False,
    keep: bool = False,
) -> None:
    """Write the reports of a run into `folder`, and print it, unless `verbose` is None; `keep` it for later ones."""
    from parity.results import memory
    from parity.results.report import render
    from parity.results.report.summary import summarise

    summary = summarise(header, rows)
    folder.mkdir(parents=True, exist_ok=True)
    if keep:
        memory.keep(memory.of(summary, code, reasons), folder / "history")
    damaged: list[str] = []
    past = memory.runs(folder / "history", damaged.append)
    ending = render.Ending(code, [*reasons, *damaged], results, folder, past)
    render.write(summary, ending)  # files first: whoever reads the terminal may stop reading
    if verbose is not None:
        render.terminal(summary, console(), ending, full=verbose)


def findings(title: str, stack: "Stack", unknown: Mapping[str, str]) -> None:
    """A table of a stack's known findings for each severity; `unknown`: id -> on what it depends whether it applies."""
    from parity.results.report.stack import APPLY, effect, fix, meaning, releases, where

    screen = console()
    screen.print(Text(title, style="bold"))
    for severity, entries in stack.by_severity.items():
        table = table_of(f"\n{meaning(severity)}", ("setting", "effect", "since", "fix", "parity replay …"))
        for e in entries:
            setting = where(e) + (f" ({unknown[e.id]})" if unknown.get(e.id) else "")
            table.add_row(*map(Text, (setting, effect(e), releases(e), fix(e), e.id)))
        table.columns[2].max_width, table.columns[3].max_width, table.columns[4].no_wrap = 14, 16, True
        screen.print(table)
    if any("`apply`" in fix(e) for e in stack.entries):
        screen.print(Text(f"\n{APPLY}"))
    screen.print(Text("\nIn settings that no check drives: docs/measured/trainers-unchecked.md"))


def table_of(title: str, headings: Sequence[str], show_header: bool = True) -> Table:
    table = Table(box=None, pad_edge=False, show_header=show_header, padding=(0, 2, 0, 0))
    table.title, table.title_justify, table.title_style = Text(title), "left", "bold"
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table
