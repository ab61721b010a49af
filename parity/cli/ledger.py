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
_LEDGER = options.path("--ledger", "default: cases/ledger.toml")


@click.group("ledger")
def ledger_command() -> None:
    """Add findings to the list of known ones."""


@ledger_command.command("add")
@click.argument("case", metavar="CASE")
@click.option("--implementation", default=None, metavar="ID", help="which one, if several fail on CASE")
@click.option("--reason", required=True, help="what is wrong, in one or two sentences")
@click.option("--link", required=True, help="an issue, or file and function of a release")
@click.option("--expires", default="", metavar="TIME", help="ask to look at it again after this time, such as 720h")
@_RESULTS
@_LEDGER
def add_command(
    case: str, implementation: str | None, reason: str, link: str, expires: str, results: Path, ledger: Path
) -> None:
    """Add the new finding that the last run has on CASE."""
    _, found = _found(results)
    chosen = [f for f in found if f.lead.case == case and implementation in (None, f.implementation)]
    if not chosen:
        known = ", ".join(f"{f.lead.case} ({f.implementation})" for f in found)
        raise UsageError(
            f"case {case!r}: {results} has no new finding on it, choose from {known or 'none: it has no new findings'}"
        )
    for id in _write(chosen, results, ledger, reason, link, expires):
        click.echo(f"entered {id}")


@ledger_command.command("accept")
@click.option(
    "--expires", default="720h", show_default=True, metavar="TIME", help="each entry must be looked at after this time"
)
@_RESULTS
@_LEDGER
def accept_command(expires: str, results: Path, ledger: Path) -> None:
    """Add all new findings of a run as a baseline.

    Each is marked as unexplained, and turns a run red when it expires.
    """
    header, found = _found(results)
    if header.interrupted is True:
        raise UsageError(
            f"{results}: the run did not finish, so findings may be missing: first parity run --resume {results}"
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
