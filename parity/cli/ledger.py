"""`parity ledger add` and `accept`: entries written from what a run found."""

import datetime
from pathlib import Path
from typing import Any

import click

from parity import data
from parity.cli import options
from parity.cli.nightly import duration
from parity.errors import UsageError
from parity.results.header import Header

_RESULTS = click.option(
    "--run", "results", type=click.Path(path_type=Path), default=Path("reports/results.ndjson"), show_default=True
)
_LEDGER = options.path("--ledger", "default: the one of this checkout")


@click.group("ledger")
def ledger_command() -> None:
    """Known findings: write an entry, or accept those of a run as a baseline."""


@ledger_command.command("add")
@click.argument("case", metavar="CASE")
@click.option("--implementation", default=None, metavar="ID", help="whose, where several fail on the case")
@click.option("--reason", required=True, help="what is wrong, in one or two sentences")
@click.option("--link", required=True, help="where it is discussed: an issue, or file and function of a release")
@click.option("--expires", default="", metavar="TIME", help="look at it again after 720h, for example")
@_RESULTS
@_LEDGER
def add_command(
    case: str, implementation: str | None, reason: str, link: str, expires: str, results: Path, ledger: Path
) -> None:
    """Enter what fails anew on CASE in the last run, no wider than it is."""
    _, found = _found(results)
    chosen = [f for f in found if f.lead.case == case and implementation in (None, f.implementation)]
    if not chosen:
        known = ", ".join(f"{f.lead.case} ({f.implementation})" for f in found)
        raise UsageError(
            f"case {case!r}: no new finding of {results} has it, choose from {known or 'none: it has none'}"
        )
    for id in _write(chosen, results, ledger, reason, link, expires):
        click.echo(f"entered {id}")


@ledger_command.command("accept")
@click.option("--expires", default="720h", show_default=True, metavar="TIME", help="each entry turns red after so long")
@_RESULTS
@_LEDGER
def accept_command(expires: str, results: Path, ledger: Path) -> None:
    """Take all new findings of a run as the baseline of your own stack, each marked as unexplained, until it expires."""
    header, found = _found(results)
    if header.interrupted is True:
        raise UsageError(
            f"{results}: its run did not finish, a baseline would lack the rest: parity run --resume {results}"
        )
    if not found:
        click.echo(f"{results}: no new findings, nothing to accept")
        return
    for id in _write(found, results, ledger, f"Unexplained: accepted from run {header.run}.", "", expires):
        click.echo(f"accepted {id}")


def _found(results: Path) -> tuple[Header, list[Any]]:
    from parity.results.report.rows import read
    from parity.results.report.summary import summarise

    header, rows = read(results)
    return header, list(summarise(header, rows).findings)


def _write(findings: list[Any], results: Path, ledger: Path | None, reason: str, link: str, expires: str) -> list[str]:
    from parity.registry import family, load
    from parity.results.ledger_edit import append, entry
    from parity.running.find import find

    until = None
    if expires:
        until = (datetime.datetime.now(datetime.UTC) + duration(expires)).date()
    libraries = {i.id: i.library for i in load().values()}
    entries = []
    for finding in findings:
        if not finding.lead.settings:  # about the whole run: it has no case
            continue
        case, _ = find(finding.lead.case, results.parent)
        shapes = [*family(case.family).shapes, "lengths"]
        library = libraries.get(finding.implementation, "")
        entries.append((entry(case, finding, library, reason, link, until, shapes), case))
    return append(ledger or data.ledger_file(), entries, again=not link)
