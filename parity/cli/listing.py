"""`parity list`: families, implementations and settings, from the registry."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.table import Table

from parity.registry import load, loss_families, loss_family, resolved
from parity.trainers import catalogue


def show(console: Console, families: Iterable[str] = ()) -> None:
    """Print each family with its implementations and settings.

    Raises:
        UsageError: for a family that does not exist.
    """
    chosen = tuple(map(resolved, families)) or (*loss_families(), *catalogue.names())
    registry = load()
    for name in chosen:
        if catalogue.is_trainer(name):
            _show_trainer(console, name)
            continue
        fam = loss_family(name)
        console.print(f"\n[bold]family {name}[/bold]: {', '.join(fam.outputs)} and gradients")
        table = Table(box=None, pad_edge=False)
        for column in ("implementation", "role", "version", "contexts", "note"):
            table.add_column(column, overflow="fold")
        for item in sorted(registry.values(), key=lambda i: (i.role != "reference", i.id)):
            if item.family != name:
                continue
            note = item.missing() or ("Triton" if item.interpreted else "") + (" opt-in" if item.opt_in else "")
            version = f"{item.library} {item.version() or '-'}" if item.library else "parity"
            table.add_row(item.id, item.role, version, " ".join(sorted(item.contexts)), note.strip())
        console.print(table)
        settings = Table(box=None, pad_edge=False, show_header=True)
        for column in ("setting", "default", "values", "meaning"):
            settings.add_column(column, overflow="fold")
        for key, setting in fam.settings.items():
            values = "" if setting.choices is None else " ".join(map(str, setting.choices))
            settings.add_row(key, str(setting.default), values, setting.doc)
        console.print(settings)
    if any(catalogue.is_trainer(name) for name in chosen):
        _show_uncovered(console)


def _show_uncovered(console: Console) -> None:
    """The trainers of the installed TRL without a check, each with the reason."""
    from parity.trainers.checks import installed

    table = Table(box=None, pad_edge=False)
    for column in ("trainer without a check", "why"):
        table.add_column(column, overflow="fold")
    for name, told in installed.described():
        if name not in installed.covered():
            table.add_row(name, told.removeprefix("no check: "))
    console.print("\n", table)


def _show_trainer(console: Console, name: str) -> None:
    """The checks of a trainer, their settings and how often a profile has them."""
    fam = catalogue.family(name)
    console.print(f"\n[bold]trainer {name}[/bold]: checks on a real {catalogue.TRAINERS[name]}")
    table = Table(box=None, pad_edge=False)
    for column in ("check", "run as", "pr", "nightly", "settings", "meaning"):
        table.add_column(column, overflow="fold")
    counted = {p: [c.settings["check"] for c in catalogue.cases(name, p, 0)] for p in ("pr", "nightly")}
    for one in fam.checks.values():
        counts = [str(counted[p].count(one.name)) for p in ("pr", "nightly")]
        table.add_row(one.name, " ".join(one.ways), *counts, " ".join(one.settings), one.doc)
    console.print(table)
    console.print(f"run as: {'; '.join(f'{name}.{way}: {doc}' for way, doc in catalogue.WAYS.items())}")
