"""Values that the shell completes: names of the registry and of the ledger, behind commas too."""

from collections.abc import Callable, Iterable
from typing import Any

import click


def values(names: Callable[[], Iterable[str]]) -> Callable[[click.Context, click.Parameter, str], list[Any]]:
    """`shell_complete` of an option or argument: the names that continue the last word behind a comma."""

    def complete(ctx: click.Context, parameter: click.Parameter, word: str) -> list[Any]:
        before, comma, last = word.rpartition(",")
        return [f"{before}{comma}{name}" for name in names() if name.startswith(last)]

    return complete


def families() -> list[str]:
    """Loss families and trainers."""
    from parity.registry import loss_families
    from parity.trainers.check import TRAINERS

    return [*loss_families(), *TRAINERS]


def trainers() -> list[str]:
    """Trainers."""
    from parity.trainers.check import TRAINERS

    return list(TRAINERS)


def implementations() -> list[str]:
    """Ids of implementations."""
    from parity.registry import load

    return sorted(load())


def profiles() -> list[str]:
    """Profiles."""
    from parity.case.profiles import PROFILES

    return list(PROFILES)


def dtypes() -> list[str]:
    """Dtypes."""
    return ["fp32", "fp16", "bf16"]


def devices() -> list[str]:
    """Devices."""
    return ["auto", "cpu", "cuda"]


def cases() -> list[str]:
    """What `replay` takes by name: ledger entries and frozen cases."""
    from parity import data
    from parity.results.ledger import Ledger

    return sorted({e.id for e in Ledger.load(data.ledger_file()).entries} | {p.stem for p in data.frozen_cases()})
