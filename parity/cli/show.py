"""What a run writes and prints at its end."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import click

from parity.cli.group import console
from parity.errors import UsageError
from parity.results.header import Header
from parity.results.row import Row


@dataclasses.dataclass(frozen=True)
class Detail:
    """How much a command prints of a run."""

    verbose: bool = False
    quiet: bool = False
    json: bool = False
    timings: bool = False


def detail(command: Any) -> Any:
    """The options that say how much is printed; the command gets a `Detail`."""

    @functools.wraps(command)
    def with_detail(verbose: bool, quiet: bool, as_json: bool, timings: bool, **options: Any) -> Any:
        if verbose + quiet + as_json > 1 or (as_json and timings):
            raise UsageError("-v, -q and --json cannot be used together, nor --json with --timings")
        return command(detail=Detail(verbose, quiet, as_json, timings), **options)

    for option in (
        click.option("--timings", is_flag=True, help="print where the CPU time went"),
        click.option("--json", "as_json", is_flag=True, help="print one JSON object"),
        click.option("-q", "--quiet", is_flag=True, help="print the verdict only"),
        click.option("-v", "--verbose", is_flag=True, help="print every table and finding"),
    ):
        with_detail = option(with_detail)
    return with_detail


def report(
    header: Header,
    rows: list[Row],
    folder: Path,
    reasons: list[str],
    code: int,
    detail: Detail = Detail(),
    keep: bool = False,
) -> None:
    """Write the reports of a run into `folder`, then print it; `keep` it among the runs that later ones are compared with."""
    from parity.results import json_output, memory, trend
    from parity.results.report import html, junit, markdown, terminal, timings
    from parity.results.report.summary import summarise
    from parity.results.report.wording import compared, headline, verdict

    summary = summarise(header, rows)
    folder.mkdir(parents=True, exist_ok=True)
    if keep:
        memory.keep(memory.of(summary, code, reasons), folder / "history")
    damaged: list[str] = []
    past = memory.runs(folder / "history", damaged.append)
    junit.write(summary, folder / "junit.xml")  # files first: whoever reads the terminal may stop reading
    markdown.write(summary, folder / "summary.md", code, reasons)
    html.write(summary, folder / "index.html", code, [*reasons, *damaged], past)
    change = trend.of(summary.run, past)
    ending = terminal.Ending(code, reasons, folder, change.growth if change else ())
    screen = console()
    if detail.json:
        click.echo(json_output.text(json_output.of_run(summary, code, reasons)))
    elif detail.quiet:
        terminal.show([(f"{headline(summary)} · {compared(summary)} · {verdict(summary, code)}", "")], screen)
    elif detail.verbose:
        terminal.render_in_full(summary, screen, ending)
    else:
        terminal.render(summary, screen, ending)
    if detail.timings:
        terminal.show([(line, "") for line in timings.lines(header.parts)], screen)
