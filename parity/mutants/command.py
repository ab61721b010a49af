"""`parity mutants`: the kill matrix of the harness itself."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click
from rich.console import Console

from parity.mutants import FAMILIES


@click.command("mutants")
@click.option(
    "--seeds", type=click.IntRange(1), default=1, show_default=True, help="streams of cases, 10 for the full matrix"
)
@click.option("--family", "families", multiple=True, type=click.Choice(FAMILIES), help="only this family")
@click.option(
    "--cases", type=click.IntRange(1), default=None, help="cases of a stream; default: as many as profile pr draws"
)
@click.option("--workers", type=int, default=2, show_default=True, help="processes")
@click.option("--results", type=click.Path(path_type=Path), default=Path("reports/mutants.ndjson"), show_default=True)
@click.option("--markdown", is_flag=True, help="print the table as Markdown")
def mutants_command(
    seeds: int, families: tuple[str, ...], cases: int | None, workers: int, results: Path, markdown: bool
) -> None:
    """Run deliberately wrong implementations: 0 when every one is killed and every correct one lives, else 1."""
    from parity.mutants import table
    from parity.mutants.matrix import Fate, kill_matrix

    fates: list[Fate] = []
    for done in kill_matrix(range(seeds), cases, families or FAMILIES, workers):
        fates += done
        table.write(fates, results)
        wrong = sum(not fate.right for fate in done)
        click.echo(f"{done[0].family}, seed {done[0].seed}: {wrong} of {len(done)} with the wrong fate", err=True)
    found = table.lines(fates)
    if markdown:
        click.echo(table.markdown(found))
        click.echo("\n" + table.summary(found))
    else:
        width = None if sys.stdout.isatty() else int(os.environ.get("COLUMNS", "160"))
        table.show(found, Console(width=width, highlight=False))
    sys.exit(0 if all(line.right for line in found) else 1)
