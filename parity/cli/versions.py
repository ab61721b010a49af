"""The commands about versions: history, bisect, compare, env."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import click
from packaging.utils import canonicalize_name

from parity.cli import options
from parity.cli.show import text
from parity.versions.client import EnvironmentUnusable, cache_folder

FOUND, NOT_FOUND, USAGE, UNUSABLE = 0, 1, 2, 3


def _usable(command: Callable[..., int]) -> Callable[..., None]:
    """End the process with the command's exit code; an unusable environment, or a full disk, is one line and 3."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            sys.exit(command(*args, **kwargs))
        except EnvironmentUnusable as error:
            click.echo(f"parity: {error}", err=True)
        except BrokenPipeError:
            raise
        except OSError as error:
            click.echo(f"parity: {error.filename or 'a file'}: {error.strerror or error}", err=True)
        sys.exit(UNUSABLE)

    return run


def _progress(line: str) -> None:
    click.echo(line, err=True)


@click.command("history", epilog="Example: parity history --record dpo-liger-head")
@click.option("--record", "ids", multiple=True, metavar="ID", help="only this record; may be repeated")
@click.option("--recall", is_flag=True, help="instead: which records are found by random cases alone")
@click.option(
    "--profile", type=click.Choice(["quick", "pr", "nightly"]), default="pr", help="with --recall: how many cases"
)
@options.device("cpu")
@_usable
def history_command(ids: tuple[str, ...], recall: bool, profile: str, device: str) -> int:
    """Run recorded failures of older releases again.

    Each must show in the bad releases and be gone in the good ones.
    """
    from parity.results.report import measured
    from parity.versions import history

    records = history.load(ids)
    if recall:
        from parity.versions import recall as drawn

        seen = drawn.recall(records, profile, _progress, device)
        click.echo(f"{measured.head('What plain draws find', 'parity', 'recall.md')}\n{drawn.table(seen, profile)}")
        return FOUND
    findings = history.recall(records, _progress, device)
    click.echo(f"{measured.head('Real upstream failures', 'parity', 'history.md')}\n{history.table(findings)}")
    return history.exit_code(findings)


@click.command(
    "bisect", epilog="Example: parity bisect trl --good 1.13.0 --bad 1.16.0 --case trl-online-dpo-accumulation"
)
@click.argument("package", metavar="PKG")
@click.option("--good", required=True, metavar="VER", help="a release that is right")
@click.option("--bad", required=True, metavar="VER", help="a release that is wrong")
@click.option("--case", "name", metavar="CASE", help="case file, ledger entry, or id of a case in reports/")
@click.option("--check", "record", metavar="RECORD", help="a record of `parity history`")
@click.option("--implementation", "implementations", multiple=True, metavar="ID", help="the implementation to follow")
@click.option("--quantity", "quantities", multiple=True, metavar="NAME", help="follow only this quantity of --case")
@options.choice("--find", "what to find", "broken", "fixed")
@options.choice("--failure", "with --case: what counts as wrong", "disagree", "crashed", "timed-out", "out-of-memory")
@click.option("--hold", multiple=True, metavar="PKG==VER", help="keep another package at this version")
@click.option("--reports", type=options.PATH, default=Path("reports"), help="folder to look for the id of --case")
@options.device("cpu")
@options.JSON
@_usable
def bisect_command(
    package: str,
    good: str,
    bad: str,
    find: Any,
    hold: tuple[str, ...],
    implementations: tuple[str, ...],
    device: str,
    as_json: bool,
    **chosen: Any,
) -> int:
    """Find the release of PKG that changed a result.

    Without --case and --check it compares the frozen cases in both releases and follows the clearest difference.
    """
    from parity.versions.case_check import CaseCheck
    from parity.versions.compare import first_difference
    from parity.versions.search import Answers, check_ends, search

    package = str(canonicalize_name(package))
    check_ends(package, good, bad, find)
    named = _check(package, implementations, **chosen)
    followed = named[0].case.id if named else implementations
    question = repr([package, good, bad, find, hold, device, followed, sorted(chosen.items())])
    kept = Answers(cache_folder("bisect") / f"{hashlib.sha256(question.encode()).hexdigest()[:12]}.json")

    def compared() -> CaseCheck:
        older, newer = (good, bad) if find == "broken" else (bad, good)
        _progress(f"the frozen cases in {package} {older} and {newer}")
        return first_difference(package, older, newer, hold, implementations, find, device)

    if named is None:
        check = kept.answer(CaseCheck, "differs most clearly", compared)
        _progress(f"differs most clearly: {check.about}")
    check, arguments = named or (check, f"{check.name} --implementation {check.implementation}")
    check = dataclasses.replace(check, device=device)
    done = search(
        package,
        good=good,
        bad=bad,
        check=check.measure,
        about=check.about,
        find=find,
        hold=hold,
        kept=kept,
        reproduce=f"parity replay {arguments} --device {device} --with {{high}}",
        say=_progress,
    )
    kept.end()
    code = {"found": FOUND, "swapped": USAGE, "unjudged": UNUSABLE}.get(done.found.outcome, NOT_FOUND)
    click.echo(text(done.json(code)) if as_json else done.text)
    return code


def _check(
    package: str,
    implementations: tuple[str, ...],
    name: str | None,
    record: str | None,
    quantities: tuple[str, ...],
    failure: str,
    reports: Path,
) -> tuple[Any, str] | None:
    """The check that was named, and the arguments of `parity replay` for it; None where none was."""
    from parity.errors import UsageError
    from parity.registry import select
    from parity.running.find import find as find_case
    from parity.versions import history
    from parity.versions.case_check import CaseCheck, only_implementation

    if name and record:
        raise UsageError("--case and --check both name a case; use one of them")
    if record:
        found = history.load([record])[0]
        if found.package != package:
            raise UsageError(f"record {record!r} is about {found.package}, not {package}")
        return found.check, f"{_shown(found.file)} --implementation {found.check.implementation}"
    if name:
        case, found_with = find_case(name, reports)
        chosen = only_implementation(case, implementations, found_with)
        select([chosen])
        return CaseCheck(name, case, chosen, quantities or ("*",), failure), f"{name} --implementation {chosen}"
    if quantities:
        raise UsageError("--quantity needs --case")
    return None


def _shown(path: Path) -> str:
    """A path relative to the working directory where that is possible."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


@click.command("compare", epilog="Example: parity compare trl==1.13.0 trl==1.16.0")
@click.argument("before", metavar="SPEC")
@click.argument("after", metavar="SPEC")
@click.option("--implementation", "implementations", multiple=True, metavar="ID", help="only this one")
@options.FAMILIES
@click.option("--profile", help="besides the frozen cases those that this profile draws: quick, pr or nightly")
@click.option("--all-defaults", is_flag=True, help="use each release's own default of every setting")
@options.device("cpu")
@options.JSON
@_usable
def compare_command(before: str, after: str, implementations: tuple[str, ...], as_json: bool, **asked: Any) -> int:
    """Show what changed between two releases.

    SPEC is PKG==VER. For each quantity: which release is nearer to the definition.
    """
    from parity.versions.compare import compare

    found = compare(([before], [after]), implementations, **asked)
    click.echo(text(found.json()) if as_json else found.text())
    return found.exit_code


@click.group("env")
def env_command() -> None:
    """Show or remove environments of other versions."""


@env_command.command("list", epilog="Example: parity env list")
@_usable
def env_list() -> int:
    """List name, size, date and broken packages."""
    from parity.versions.environment import environments_root, listing, own_bytes

    made = listing()
    for one in made:
        broken = [name for name, reason in one.imports.items() if reason]
        broken_text = f"  does not import: {', '.join(broken)}" if broken else ""
        click.echo(f"{one.name}  {own_bytes(one) >> 20} MB  {(one.before or 'no date')[:10]}{broken_text}")
    click.echo(f"{len(made)} environments in {environments_root()}")
    return FOUND


@env_command.command("show", epilog="Example: parity env show trl-1.16.0")
@click.argument("name")
@_usable
def env_show(name: str) -> int:
    """Show the versions in one environment.

    The beginning of its name is enough.
    """
    from parity.versions.environment import show

    made = show(name)
    click.echo(f"{made.name}\n{made.root}\nnothing newer than {made.before or 'today'}; torch from {made.torch}")
    for package, version in sorted(made.versions.items()):
        reason = made.imports.get(package)
        click.echo(f"  {package} {version}" + (f"  does not import: {reason}" if reason else ""))
    return FOUND


@env_command.command("prune", epilog="Example: parity env prune --days 7")
@click.argument("names", nargs=-1)
@click.option("--days", type=click.IntRange(min=0), default=30, show_default=True, help="unused for longer than this")
@_usable
def env_prune(names: tuple[str, ...], days: int) -> int:
    """Remove environments.

    Those named, or those unused for --days (0: all). One that is in use stays.
    """
    from parity.versions.environment import prune

    removed = prune(names, unused=timedelta(days=days) if days else None)
    for name in removed:
        click.echo(f"removed {name}")
    click.echo(f"{len(removed)} removed; locks are kept, so they can be made again without a network")
    return FOUND


COMMANDS = (history_command, bisect_command, compare_command, env_command)
