"""`--with`: the same command in an environment of other versions, in the place of this process."""

import shlex
import sys
from collections.abc import Sequence
from typing import NoReturn

import click

from parity.process import WITH
from parity.versions.environment import Environment
from parity.versions.releases import Release


def run_inside(specs: Sequence[str | Release], argv: Sequence[str]) -> NoReturn:
    """This process becomes `parity ARGV` in the environment of `specs`, made if it is not there.

    EnvironmentUnusable for one that cannot be made or imported, UsageError for a spec that cannot be read.
    """
    made = Environment.of(specs)
    click.echo(described(made), err=True)
    sys.stdout.flush()
    words = shlex.join(word for spec in specs for word in ("--with", str(spec)))
    made.become(["python", "-m", "parity", *argv], {WITH: words})


def described(made: Environment) -> str:
    """The environment on one line: versions, and which partner does not import."""
    parts = [f"with {made.partners}"]
    parts += [f"{name} does not import ({reason})" for name, reason in made.imports.items() if reason]
    return "; ".join(parts)
