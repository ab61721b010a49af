"""`--with`: the same command in an environment of other versions, its rows, reports and exit code passed through."""

from __future__ import annotations

import contextlib
import shlex
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import click
import psutil

from parity.process import WITH
from parity.versions.environment import Environment
from parity.versions.spec import Spec


def run_inside(specs: Sequence[str | Spec], argv: Sequence[str]) -> int:
    """Runs `parity ARGV` in the environment of `specs`, made if it is not there, and returns its exit code.

    Working folder, results and reports are the caller's. EnvironmentUnusable for one that cannot be made or imported,
    SpecError for a spec that cannot be read.
    """
    made = Environment.of(specs)
    click.echo(described(made), err=True)
    with forwarded():
        words = shlex.join(word for spec in specs for word in ("--with", str(spec)))
        return made.run(["python", "-m", "parity", *argv], settings={WITH: words}).returncode


@contextlib.contextmanager
def forwarded() -> Iterator[None]:
    """SIGTERM goes on to the child, whose rows and reports it ends in order; so does SIGINT, which a terminal sends to both."""

    def pass_on(number: int, frame: Any) -> None:
        if number != signal.SIGINT or not sys.stdin.isatty():
            for child in psutil.Process().children():
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.send_signal(number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def described(made: Environment) -> str:
    """The environment on one line: versions, revisions of checkouts, and which partner does not import."""
    parts = [f"with {made.partners}"]
    parts += [f"{name} from {revision}" for name, revision in made.checkouts.items()]
    parts += [f"{name} does not import ({reason})" for name, reason in made.imports.items() if reason]
    return "; ".join(parts)
