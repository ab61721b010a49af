"""The options that commands share, and the values that the shell completes: names of the registry and of the ledger."""

import functools
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import click

from parity.errors import UsageError

Option = Callable[[Any], Any]


def values(names: Callable[[], Iterable[str]]) -> Callable[[click.Context, click.Parameter, str], list[Any]]:
    """`shell_complete` of an option or argument: the names that continue the last word behind a comma."""

    def complete(ctx: click.Context, parameter: click.Parameter, word: str) -> list[Any]:
        before, comma, last = word.rpartition(",")
        return [f"{before}{comma}{name}" for name in names() if name.startswith(last)]

    return complete


PATH = click.Path(path_type=Path)


def path(name: str, help: str | None = None, default: str | None = None, **fields: Any) -> Option:
    """An option that takes a file or a folder; its default is shown if it has one."""
    start = None if default is None else Path(default)
    return click.option(name, type=PATH, default=start, show_default=default is not None, help=help, **fields)


def count(name: str, help: str | None, default: int | None = None) -> Option:
    """An option that takes a number from 1 on; its default is shown if it has one."""
    return click.option(name, type=click.IntRange(1), default=default, show_default=default is not None, help=help)


def choice(name: str, help: str | None, *names: str) -> Option:
    """An option that takes one of some words, by default the first."""
    return click.option(name, type=click.Choice(names), default=names[0], show_default=True, help=help)


def several(
    name: str, into: str, help: str, known: Callable[[], Iterable[str]], parted: bool = False, **fields: Any
) -> Option:
    """An option that may be repeated, its values `known` to the shell; `parted`: by commas too."""
    callback = _split if parted else None
    return click.option(name, into, multiple=True, callback=callback, help=help, shell_complete=values(known), **fields)


def _split(ctx: click.Context, option: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
    """Values that stand behind one another or are parted by commas."""
    return tuple(word for value in values for word in value.split(",") if word)


def families() -> list[str]:
    """Loss families and trainers."""
    from parity.registry import loss_families
    from parity.trainers.specs import TRAINERS

    return [*loss_families(), *TRAINERS]


def trainers() -> list[str]:
    from parity.trainers.specs import TRAINERS

    return list(TRAINERS)


def implementations() -> list[str]:
    from parity.registry import load

    return sorted(load())


def profiles() -> list[str]:
    from parity.case.profiles import PROFILES

    return list(PROFILES)


def dtypes() -> list[str]:
    return ["fp32", "fp16", "bf16"]


def devices() -> list[str]:
    return ["auto", "cpu", "cuda"]


def cases() -> list[str]:
    """What `replay` takes by name: ledger entries and frozen cases."""
    from parity import data
    from parity.results.ledger import Ledger

    return sorted({e.id for e in Ledger.load(data.ledger_file()).entries} | {p.stem for p in data.frozen_cases()})


DEVICE = click.option(
    "--device", default="auto", show_default=True, help="auto, cpu or cuda", shell_complete=values(devices)
)
FAMILIES = several(
    "--family",
    "families",
    "only this loss or trainer (names: parity list), or your own; separate several by commas",
    families,
    parted=True,
    metavar="NAME|FILE.py:NAME",
)
IMPLEMENTATIONS = several(
    "--implementation",
    "implementations",
    "only this one, a pattern (liger.*), or your own function or trainer; separate several by commas",
    implementations,
    parted=True,
    metavar="ID|FILE.py:NAME",
)
LEDGER = path("--ledger", "another list of known findings")
REPORTS = path("--reports", "folder for reports", "reports")
JSON = click.option("--json", "as_json", is_flag=True, help="print JSON")
RAY = click.option(
    "--ray", default=None, metavar="HOST:PORT|auto|local", help="run on this Ray cluster (docs/scale.md)"
)


def device(default: str) -> Option:
    """`--device`, "cpu" or "cuda" once it is read."""
    said = "auto, cpu or cuda"
    return click.option("--device", default=default, callback=_there, show_default=True, help=said)


def _there(ctx: click.Context, option: click.Parameter, value: str) -> str:
    """ "cpu" or "cuda", which must be usable."""
    from parity.running.provenance import resolve_device

    return resolve_device(value)


def with_versions(command: Callable[..., None]) -> Callable[..., None]:
    """`--with`: the command, as it was called, inside an environment of other versions."""

    @functools.wraps(command)
    def here_or_inside(specs: tuple[str, ...], **given: Any) -> None:
        if not specs:
            return command(**given)
        if given.get("ray"):
            raise UsageError(
                "--ray and --with cannot be used together: other releases are installed on this machine only"
            )
        from parity.versions.inside import run_inside

        words = sys.argv[1:]
        values = {n + 1 for n, word in enumerate(words) if word == "--with"}
        kept = [w for n, w in enumerate(words) if n not in values and w != "--with" and not w.startswith("--with=")]
        sys.exit(run_inside(specs, kept))

    said = "use this version, installed in a separate environment"
    return click.option("--with", "specs", multiple=True, metavar="PKG==VER", help=said)(here_or_inside)
