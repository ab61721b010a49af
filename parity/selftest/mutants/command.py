"""`parity mutants`: run the mutants and print which are caught."""

from pathlib import Path

import click
from rich.console import Console

from parity.errors import UsageError
from parity.registry import meant
from parity.results.report import measured
from parity.results.turns import Turns
from parity.selftest.mutants import FAMILIES, TRAINERS, machine, machine_page, table
from parity.selftest.mutants.laboratory import Mutated
from parity.selftest.mutants.matrix import Fate, kill_matrix

ROWS, MACHINE = Path("reports/mutants.ndjson"), "reports/mutants-machine-{source}-{seed}.ndjson"


def run(
    console: Console,
    seeds: int,
    families: tuple[str, ...],
    cases: int | None,
    workers: int,
    markdown: bool,
    device: str = "cpu",
    turns: Path | None = None,
) -> int:
    """Run the matrix and print it: 0 when every mutant is killed and every control lives, else 1.

    Raises:
        UsageError: for a family without mutants.
    """
    for name in families:
        if ".py:" not in name and name not in (*FAMILIES, *TRAINERS):
            raise UsageError(f"family {name!r} has no mutants, {meant(name, (*FAMILIES, *TRAINERS))}")
    fates: list[Fate] = []
    for done in kill_matrix(
        range(seeds), cases, families or (*FAMILIES, *TRAINERS), workers, device, Turns.read(turns)
    ):
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


def run_machine(sources: tuple[str, ...], seed: int, sample: int, markdown: bool) -> int:
    """Run a sample of the mutants by machine from each source, and print what became of them: 0 when none survives."""
    found: list[Mutated] = []
    for source in sources:
        done: list[Mutated] = []
        for done in machine.run(source, seed, sample, Path(MACHINE.format(source=source, seed=seed))):
            click.echo(f"{source}: {machine_page.summary(done)}", err=True)
        found += done
    if markdown:
        click.echo(measured.head("Mutants by machine", "parity", "machine-mutants.md"))
    click.echo(machine_page.markdown(found), nl=False)
    return int(any(m.fate == "survived" for m in found))
