"""How every command ends: one-line errors that the user can fix, and a parent process where foreign code runs."""

import errno
import io
import os
import sys
import traceback
from typing import Any

import click
from rich.console import Console

from parity.errors import FAULT, INTERRUPTED, NO_JUDGEMENT, NOTHING, TERMINATED, UNREAD, USAGE, UsageError
from parity.process import Terminated, tell, under_watch
from parity.versions.client import EnvironmentUnusable

FULL = "ENOSPC EDQUOT EFBIG".split()  # what keeps a report from being written, whichever file it is
UNWRITABLE = [*FULL, "EROFS", "EISDIR", "ENOTDIR", "EACCES", "EPERM"]  # and where an error names the file
REMOVED: dict[str, str] = {
    "case": "`parity replay CASE` runs a case and shows its settings where it disagrees",
    "history-of": "`parity notify` says since when each finding is seen; kept runs are JSON in reports/history/",
    "rollouts list": "`parity doctor` names the shipped recordings, `parity rollouts judge FILE` says where one comes from",
    "rollouts live": "`parity rollouts record` and `parity rollouts judge` hold an engine against a model",
    "rollouts replay": "cases of the policy family with a setting `recording` have a recorded importance ratio",
    "merge": "one run on several machines is `parity run --ray ADDRESS`",
    "env": "environments that nobody used for 30 days go when another is made; `parity doctor` names their folder",
    "ledger accept": "`parity ledger add --all` takes all new findings of a run as a baseline",
    "schema": "docs/results.md explains the fields of a results file",
    "audit": "`parity list --settings RESULTS` says of a run which implementation agrees with which setting",
    "matrix": "compare two releases with `parity compare PKG==VER PKG==VER`, find the one that changed with `parity bisect PKG`",
    "mutants": "in a checkout, `make selftest` runs the deliberately wrong implementations with pytest",
}
"""Commands of earlier versions, and the sentence that says how to do their work today."""

NARROWEST = 20  # columns below which COLUMNS says nothing: some terminals give 0


class Quiet(Console):
    """Prints no more once its reader has gone away, and nothing else changes."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        silence()


def console() -> Console:
    """The terminal, or a page of 110 columns (COLUMNS) where the output is none."""
    asked = os.environ.get("COLUMNS", "")
    width = None if sys.stdout.isatty() else int(asked) if asked.isdecimal() and int(asked) >= NARROWEST else 110
    return Quiet(width=width, soft_wrap=False, highlight=False)


def silence() -> None:
    """Standard output to nowhere, so that the interpreter's last flush finds no broken pipe."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Commands(click.Group):
    """Commands; one that was removed names its successor."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = " ".join([*([str(ctx.info_name)] if ctx.parent else []), *args[:1]])
        if name in REMOVED:
            raise UsageError(f"`parity {name}` was removed: {REMOVED[name]}")
        return super().resolve_command(ctx, args)


class Group(Commands):
    """Ends in the codes of this module, whatever is raised."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The command line itself; calls from Python go through `main` and stay in their process."""
        words = sys.argv[1:]
        other = any(word == "--with" or word.startswith("--with=") for word in words)  # watched in its environment
        if words[:1] == ["replay"] and not other and not {"-h", "--help"} & set(words):
            sys.exit(_watched(words))
        return super().__call__(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="replace")  # a terminal without UTF-8
        try:
            return super().invoke(ctx)
        except (SystemExit, click.exceptions.Exit) as error:
            code = error.code if isinstance(error, SystemExit) else error.exit_code
            try:
                sys.stdout.flush()
            except BrokenPipeError:
                silence()
            sys.exit(_of(ctx, code) if isinstance(code, int) else code)
        except (UsageError, EnvironmentUnusable) as error:
            click.echo(f"parity: {error}", err=True)
            sys.exit(_of(ctx, USAGE if isinstance(error, UsageError) else NOTHING))
        except click.ClickException as error:
            error.show()
            sys.exit(_of(ctx, error.exit_code))
        except (KeyboardInterrupt, click.Abort) as error:
            click.echo("parity: interrupted", err=True)
            sys.exit(TERMINATED if isinstance(error, Terminated) else INTERRUPTED)
        except BrokenPipeError:
            silence()
            sys.exit(UNREAD)
        except Exception as error:
            of_file = UNWRITABLE if isinstance(error, OSError) and error.filename else FULL
            if isinstance(error, OSError) and errno.errorcode.get(error.errno or 0) in of_file:
                click.echo(f"parity: {error.filename or 'a file'}: {error.strerror}", err=True)
                sys.exit(_of(ctx, USAGE))
            traceback.print_exc()
            click.echo("parity: an error of the harness, not of a loss; please report it", err=True)
            sys.exit(_of(ctx, FAULT))


def _of(ctx: click.Context, code: int) -> int:
    """The code as the command gives it; see NO_JUDGEMENT."""
    return NO_JUDGEMENT if ctx.invoked_subcommand == "replay" and code in (USAGE, NOTHING, FAULT) else code


def _watched(words: list[str]) -> int:
    """`replay` in a child, whose end record alone is believed: a loss may end its process with any code, 0 too."""
    from parity.running.child import Ended, call

    try:
        return int(call("parity.cli.group:inside", words))
    except Ended as error:
        click.echo(f"parity: the process ended before it was done ({error})", err=True)
        return NO_JUDGEMENT
    except KeyboardInterrupt:
        return INTERRUPTED


def inside(*words: str) -> int:
    """The other side of `_watched`."""
    from parity.cli.commands import main

    under_watch()
    sys.argv = ["parity", *words]
    try:
        main.main(args=list(words), prog_name="parity")
    except SystemExit as error:
        tell(answer=error.code if isinstance(error.code, int) else int(error.code is not None))
    return 0
