"""The options that commands share."""

import datetime
import functools
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from parity.errors import UsageError

Option = Callable[[Any], Any]
PATH = click.Path(path_type=Path)


def say(line: str) -> None:
    """A line beside the output."""
    click.echo(line, err=True)


def option(name: str, help: str | None, default: Any = None, **fields: Any) -> Option:
    """An option; its default is shown if it has one."""
    return click.option(name, default=default, show_default=default is not None, help=help, **fields)


def path(name: str, help: str | None = None, default: str | None = None, **fields: Any) -> Option:
    return option(name, help, None if default is None else Path(default), type=PATH, **fields)


def count(name: str, help: str | None, default: int | None = None) -> Option:
    """An option that takes a number from 1 on."""
    return option(name, help, default, type=click.IntRange(1))


def choice(name: str, help: str | None, *names: str) -> Option:
    """An option that takes one of some words, by default the first."""
    return option(name, help, names[0], type=click.Choice(names))


def several(name: str, into: str, help: str, metavar: str | None = None) -> Option:
    """An option that may be repeated, for the parameter `into`; its values may be parted by commas."""

    def split(ctx: click.Context, option: click.Parameter, given: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(word for value in given for word in value.split(",") if word)

    return click.option(name, into, multiple=True, callback=split, help=help, metavar=metavar)


def seconds(text: str) -> float:
    """6h, 90m, 1h30m or 45s as seconds. Raises UsageError for anything else."""
    found = re.fullmatch(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", text.strip())
    if found is None or not any(found.groups()):
        raise UsageError(f"time {text!r} cannot be read, write for example 6h, 90m or 1h30m")
    h, m, s = (int(x or 0) for x in found.groups())
    try:
        return datetime.timedelta(hours=h, minutes=m, seconds=s).total_seconds()
    except OverflowError:
        raise UsageError(f"time {text!r} is longer than there is") from None


def time(name: str, help: str, default: str | None = None) -> Option:
    """An option that takes a time; the command gets seconds."""

    def read(ctx: click.Context, option: click.Parameter, value: str | None) -> float | None:
        return seconds(value) if value else None

    return option(name, help, default, metavar="TIME", callback=read)


def device(default: str) -> Option:
    """`--device`, "cpu" or "cuda" once it is read, which must be usable."""

    def there(ctx: click.Context, option: click.Parameter, value: str) -> str:
        from parity.running.provenance import resolve_device

        return resolve_device(value)

    return option("--device", "auto, cpu or cuda", default, callback=there)


DEVICE = option("--device", "auto, cpu or cuda", "auto")
FAMILIES = several(
    "--family",
    "families",
    "only this loss or trainer (names: parity list), or your own; separate several by commas",
    "NAME|FILE.py:NAME",
)
OWN_FAMILY = several("--family", "families", "a loss family of your own", "FILE.py:NAME")
IMPLEMENTATIONS = several(
    "--implementation",
    "implementations",
    "only this one, a pattern (liger.*), or your own function or trainer; separate several by commas",
    "ID|FILE.py:NAME",
)
LEDGER = path("--ledger", "known findings of your own, besides the shipped ones")
REPORTS = path("--reports", "folder for reports", "reports")
RAY = option("--ray", "run on this Ray cluster (docs/scale.md)", metavar="HOST:PORT|auto|local")


def with_versions(command: Callable[..., None]) -> Callable[..., None]:
    """`--with`: the process becomes the command, as it was called, inside an environment of other versions."""

    @functools.wraps(command)
    def here_or_inside(specs: tuple[str, ...], **given: Any) -> None:
        if not specs:
            command(**given)
            return
        if given.get("ray"):
            raise UsageError("--ray and --with cannot be used together: other releases are on this machine alone")
        from parity.process import WITH
        from parity.versions.environment import Environment

        words = sys.argv[1:]
        values = {n + 1 for n, word in enumerate(words) if word == "--with"}
        kept = [w for n, w in enumerate(words) if n not in values and w != "--with" and not w.startswith("--with=")]
        made = Environment.of(specs)
        say(made.described)
        sys.stdout.flush()
        made.become(["python", "-m", "parity", *kept], {WITH: shlex.join(w for one in specs for w in ("--with", one))})

    said = "use this version, installed in a separate environment"
    return click.option("--with", "specs", multiple=True, metavar="PKG==VER", help=said)(here_or_inside)
