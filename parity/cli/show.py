"""What a run writes and prints at its end; tables, and that of known findings, which imports no torch."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from parity.cli.group import console
from parity.errors import UsageError

if TYPE_CHECKING:
    from rich.table import Table

    from parity.results.header import Header
    from parity.results.report.stack import Stack
    from parity.results.row import Row


@dataclasses.dataclass(frozen=True)
class Detail:
    """How much a command prints of a run."""

    verbose: bool = False
    quiet: bool = False


def detail(command: Any) -> Any:
    """The options that say how much is printed; the command gets a `Detail`."""

    @functools.wraps(command)
    def with_detail(verbose: bool, quiet: bool, **options: Any) -> Any:
        if verbose and quiet:
            raise UsageError("-v and -q cannot be used together")
        return command(detail=Detail(verbose, quiet), **options)

    for option in (
        click.option("-q", "--quiet", is_flag=True, help="print the verdict only"),
        click.option("-v", "--verbose", is_flag=True, help="print every table and finding"),
    ):
        with_detail = option(with_detail)
    return with_detail


def report(
    header: "Header",
    rows: "list[Row]",
    results: Path,
    folder: Path,
    reasons: list[str],
    code: int,
    detail: Detail = Detail(),
    keep: bool = False,
) -> None:
    """Write the reports of a run into `folder`, then print it; `keep` it among the runs that later ones are compared with."""
    from parity.results import memory
    from parity.results.report import render, wording
    from parity.results.report.summary import summarise

    summary = summarise(header, rows)
    folder.mkdir(parents=True, exist_ok=True)
    if keep:
        memory.keep(memory.of(summary, code, reasons), folder / "history")
    damaged: list[str] = []
    past = memory.runs(folder / "history", damaged.append)
    ending = render.Ending(code, [*reasons, *damaged], results, folder, past)
    render.write(summary, ending)  # files first: whoever reads the terminal may stop reading
    screen = console()
    if detail.quiet:
        render.show(f"{wording.opening(summary)} · {wording.verdict(summary, code)}", screen)
    else:
        render.terminal(summary, screen, ending, full=detail.verbose)


def findings(title: str, stack: "Stack", unknown: Mapping[str, str]) -> None:
    """A table of a stack's known findings for each severity; `unknown`: id -> what cannot be told and would decide it."""
    from rich.text import Text

    from parity.results.report.stack import APPLY, effect, fix, meaning, releases, where

    screen = console()
    screen.print(Text(title, style="bold"))
    for severity, entries in stack.by_severity.items():
        table = table_of(f"\n{meaning(severity)}", ("setting", "effect", "since", "fix", "parity replay …"))
        for e in entries:
            setting = where(e) + (f" (cannot tell: {unknown[e.id]})" if unknown.get(e.id) else "")
            table.add_row(*map(Text, (setting, effect(e), releases(e), fix(e), e.id)))
        table.columns[2].max_width, table.columns[3].max_width, table.columns[4].no_wrap = 14, 16, True
        screen.print(table)
    if any("`apply`" in fix(e) for e in stack.entries):
        screen.print(Text(f"\n{APPLY}"))


def table_of(title: str, headings: Sequence[str], show_header: bool = True) -> "Table":
    """An empty table."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, show_header=show_header, padding=(0, 2, 0, 0))
    table.title, table.title_justify, table.title_style = Text(title), "left", "bold"
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table


def text(value: Any) -> str:
    """The JSON of a structure or of a list of them, indented."""
    import msgspec

    return msgspec.json.format(msgspec.json.encode(value), indent=1).decode()
