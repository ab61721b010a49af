"""The commands about versions: history, bisect, compare."""

import dataclasses
import sys
from pathlib import Path
from typing import Any

import click

from parity.cli import options
from parity.errors import AGREE, NEW, NOTHING, USAGE, UsageError


@click.command("history", epilog="Example: parity history --record dpo-liger-head")
@click.option("--record", "ids", multiple=True, metavar="ID", help="only this record; may be repeated")
@click.option("--recall", is_flag=True, help="instead: which records are found by random cases alone")
@options.choice("--profile", "with --recall: how many cases", "pr", "quick", "nightly")
@options.device("cpu")
def history_command(ids: tuple[str, ...], recall: bool, profile: str, device: str) -> None:
    """Run recorded failures of older releases again.

    Each must appear in the bad releases and not in the good ones.
    """
    from parity.results.report import measured
    from parity.versions import history

    records = history.load(ids)
    if recall:
        seen, title = history.recall(records, profile, options.say, device), "What plain draws find"
        click.echo(f"{measured.head(title, 'parity', 'recall.md')}\n{history.recall_table(seen, profile)}")
        return
    findings = history.recheck(records, options.say, device)
    click.echo(f"{measured.head('Real upstream failures', 'parity', 'history.md')}\n{history.table(findings)}")
    sys.exit(history.exit_code(findings))


@click.command("bisect", epilog="Example: parity bisect trl --bad 0.28.0 --good 0.29.1 --find fixed --case is-ratio")
@click.argument("package", metavar="PKG")
@click.option("--good", required=True, metavar="VER", help="a release that is right")
@click.option("--bad", required=True, metavar="VER", help="a release that is wrong")
@click.option("--case", "name", required=True, metavar="CASE", help="a file, ledger entry, record, or id of a case")
@options.IMPLEMENTATIONS
@click.option("--quantity", "quantities", multiple=True, metavar="NAME", help="follow only this quantity")
@options.choice("--find", "what to find", "broken", "fixed")
@options.choice("--failure", "what counts as wrong", "disagree", "crashed", "timed-out", "out-of-memory")
@click.option("--hold", multiple=True, metavar="PKG==VER", help="keep another package at this version")
@options.path("--reports", "folder of the run that has the id of --case", "reports")
@options.device("cpu")
def bisect_command(
    package: str,
    name: str,
    implementations: tuple[str, ...],
    quantities: tuple[str, ...],
    failure: str,
    reports: Path,
    device: str,
    **asked: Any,
) -> None:
    """Find the release of PKG that changed a result.

    `parity compare` names the cases that differ between two releases.
    """
    from packaging.utils import canonicalize_name

    from parity.registry import select
    from parity.sampling.find import find as find_case
    from parity.sampling.find import only_one
    from parity.versions import history
    from parity.versions.bisect import search
    from parity.versions.look import CaseCheck, only_implementation

    package = str(canonicalize_name(package))
    if not implementations and (history.folder() / f"{name}.toml").exists():
        record = history.load([name])[0]
        if record.package != package:
            raise UsageError(f"record {name!r} is about {record.package}, not {package}")
        check, file = record.check, record.file
        name = str(file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file)
    else:
        case, found_with = find_case(name, reports)
        chosen = only_implementation(case, implementations, found_with or only_one(name))
        select([chosen])
        check = CaseCheck(name, case, chosen, quantities or ("*",), failure)
    check = dataclasses.replace(check, device=device)
    replay = f"parity replay {name} --implementation {check.implementation} --device {device} --with {{high}}"
    done = search(package, check=check.measure, about=check.about, reproduce=replay, say=options.say, **asked)
    click.echo(done.text)
    sys.exit({"found": AGREE, "swapped": USAGE, "unjudged": NOTHING}.get(done.found.outcome, NEW))


@click.command("compare", epilog="Example: parity compare trl==1.13.0 trl==1.16.0")
@click.argument("before", metavar="SPEC")
@click.argument("after", metavar="SPEC")
@options.IMPLEMENTATIONS
@options.FAMILIES
@options.device("cpu")
@click.option("--all", "each", is_flag=True, help="a line for each case, not for each kind of change")
def compare_command(before: str, after: str, implementations: tuple[str, ...], each: bool, **asked: Any) -> None:
    """Show what changed between two releases.

    SPEC is PKG==VER. For each quantity: which release is nearer to the definition.
    """
    from parity.versions.compare import compare

    found = compare(([before], [after]), implementations, **asked)
    click.echo(found.text(each))
    sys.exit(found.exit_code)


COMMANDS = (history_command, bisect_command, compare_command)
