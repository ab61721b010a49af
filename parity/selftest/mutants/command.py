"""`parity mutants`: run the mutants and print which are caught."""

from pathlib import Path

import click
from rich.console import Console

from parity.errors import UsageError
from parity.registry import meant
from parity.results.report import measured
from parity.selftest.mutants import FAMILIES, TRAINERS, table
from parity.selftest.mutants.matrix import Fate, kill_matrix

ROWS = Path("reports/mutants.ndjson")


def run(
    console: Console,
    seeds: int,
    families: tuple[str, ...],
    cases: int | None,
    workers: int,
    markdown: bool,
    device: str = "cpu",
) -> int:
    """Run the matrix and print it: 0 when every mutant is killed and every control lives, else 1.

    Raises:
        UsageError: for a family without mutants.
    """
    for name in families:
        if ".py:" not in name and name not in (*FAMILIES, *TRAINERS):
            raise UsageError(f"family {name!r} has no mutants, {meant(name, (*FAMILIES, *TRAINERS))}")
    fates: list[Fate] = []
    for done in kill_matrix(range(seeds), cases, families or (*FAMILIES, *TRAINERS), workers, device):
        fates += done
        table.write(fates, ROWS)
        wrong = sum(not fate.right for fate in done)
        click.echo(f"{done[0].family}, seed {done[0].seed}: {wrong} of {len(done)} with the wrong fate", err=True)
    found = table.lines(fates)
    if markdown:
        click.echo(measured.head("Deliberately wrong implementations", "parity", "mutants.md"))
        click.echo(f"{table.markdown(found)}\n\n{table.summary(found)}")
    else:
        table.show(found, console)
    return int(not all(line.right for line in found))
