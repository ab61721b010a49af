"""`parity ledger add` and `measure`: entries, and what frozen cases give, written from what a run found."""

import dataclasses
import datetime
import sys
import tempfile
from pathlib import Path

import click

from parity import data
from parity.cli import options
from parity.cli.group import Commands
from parity.cli.progress import Shown
from parity.errors import NOTHING, UsageError

MONTH = 30 * 24 * 3600.0  # seconds


@click.group("ledger", cls=Commands)
def ledger_command() -> None:
    """Add findings to the list of known ones, or update those."""


@ledger_command.command("add", epilog="Example: parity ledger add policy-3f2a --reason 'drops a mask' --link trl:loss")
@click.argument("case", required=False, metavar="CASE")
@click.option("--all", "every", is_flag=True, help="all new findings of the run, as a baseline: each is unexplained")
@click.option("--implementation", default=None, metavar="ID", help="which one, if several fail on CASE")
@click.option("--reason", help="what is wrong, in one or two sentences")
@click.option("--link", help="an issue, or file and function of a release")
@options.time("--expires", "ask to look at it again after this time; default with --all: 720h")
@options.path("--run", "a results file", "reports/results.ndjson")
@options.path("--ledger", "your own; default: that of the run, else the shipped one")
def add_command(
    case: str | None,
    every: bool,
    implementation: str | None,
    reason: str | None,
    link: str | None,
    expires: float | None,
    run: Path,
    ledger: Path | None,
) -> None:
    """Add new findings of the last run.

    Give CASE with --reason and --link to add the finding on that case, or --all.
    """
    from parity.registry import family, load
    from parity.results import recorded
    from parity.results.ledger_edit import append, entry
    from parity.results.report.rows import read
    from parity.results.report.summary import summarise
    from parity.sampling.find import find
    from parity.trainers.catalogue import TrainerFamily

    if every == (case is not None):
        raise UsageError("ledger add: name a CASE, or --all")
    header, rows = read(run)
    found = list(summarise(header, rows).findings)
    if every:
        if header.interrupted is True:
            raise UsageError(f"{run}: did not finish, so findings may be missing: first parity run --resume {run}")
        reason, link, expires = f"Unexplained: accepted from run {header.run}.", "", expires or MONTH
    elif not (reason and link):
        raise UsageError("ledger add CASE: say what is wrong and where, with --reason and --link")
    else:
        known = ", ".join(f"{f.lead.case} ({f.implementation})" for f in found) or "none: it has no new findings"
        its = [f for f in found if case in {part.lead.case for part in f.parts}]
        own = [f for one in its for f in one.each if f.implementation == implementation]
        found = [f for f in own if case in {part.lead.case for part in f.parts}] if implementation else its
        if not found:
            of_it = f" of {implementation}" if implementation else ""
            raise UsageError(f"case {case!r}: {run} has no new finding{of_it} on it, choose from {known}")
        if len(several := sorted({f.implementation for f in found})) > 1:
            raise UsageError(f"case {case!r}: {', '.join(several)} fail on it: say which, with --implementation")
    if not found:
        click.echo(f"{run}: no new findings")
        return
    now = datetime.datetime.now(datetime.UTC)
    until = None if expires is None else (now + datetime.timedelta(seconds=expires)).date()
    libraries = {i.id: i.library for i in load().values()}
    asked = header.header.asked.ledger if header.header.asked else None
    file, entries = ledger or (Path(asked) if asked else data.ledger_file()), []
    if not (ledger or asked or data.in_checkout()):
        raise UsageError(f"ledger add: {file} belongs to the installation: name a ledger of your own, --ledger FILE")
    for finding in (f for f in found if f.lead.settings):  # one about the whole run has no case
        of, _ = find(finding.lead.case, run.parent)
        about, library = family(of.family), libraries.get(finding.implementation, "")
        whose = {f.implementation for f in finding.each}
        rows_of = [r for r in rows if r.implementation in whose]
        agreeing = [r for r in rows_of if r.verdict == "agree" and r.quantity in finding.roots]
        settings = about.check(of).settings if isinstance(about, TrainerFamily) else about.settings
        defaults = {name: setting.default for name, setting in settings.items()}
        new = entry(of, finding, library, reason, link, until, [*about.shapes, "lengths"], defaults, agreeing)
        at_case = [r for r in rows_of if r.case == of.id]
        gave = recorded.of(at_case, finding.lead.device, header.header.versions, entered=True)
        entries.append((new, of, gave))
    if not entries:
        click.echo(f"{run}: its new findings are about the whole run; none has a case to be entered with")
        return
    ids = append(file, entries, again=every)
    for id in ids:
        click.echo(f"entered {id} in {file}")
    if not ids:
        click.echo(f"{file}: has all of them already")


@ledger_command.command("measure", epilog="Example: parity ledger measure liger-luspo-padding")
@click.argument("names", nargs=-1, metavar="[ENTRY|CASE]...")
@options.OWN_FAMILY
@options.IMPLEMENTATIONS
@options.DEVICE
@options.with_versions
@options.path("--ledger", "your own; default: the shipped one")
def measure_command(
    names: tuple[str, ...],
    families: tuple[str, ...],
    implementations: tuple[str, ...],
    device: str,
    ledger: Path | None,
) -> None:
    """Record the present errors of known findings in their cases.

    A later run reports a known finding as new if it grew threefold in its frozen case, changed its class, or fails in another
    quantity. Without a name: all frozen cases; with --ledger those of that ledger.
    """
    from parity.registry import load, meant
    from parity.results import recorded
    from parity.results.ledger import Ledger
    from parity.running.plan import Options, frozen_files
    from parity.running.run import execute

    book = Ledger.known(ledger)
    files, entries = frozen_files(book), book.entries
    known = {Path(name).stem: name for name in files} | {entry.id: Path(entry.case).name for entry in entries}
    if odd := next((name for name in names if name not in known), ""):
        raise UsageError(f"{odd!r} is no entry of {book.own or book.path} and no frozen case, {meant(odd, known)}")
    own = book.own.parent.resolve() if book.own else None
    mine = {Path(e.case).name for e in entries if own and (book.folder / e.case).is_relative_to(own)}
    chosen = tuple(sorted({known[name] for name in names} or mine or files))
    its = [e for e in entries if Path(e.case).name in chosen and (not names or {e.id, Path(e.case).stem} & {*names})]
    scopes = {name for e in its for name in e.implementations}
    own_scopes = {name for name in scopes if ".py:" in name}
    functions = sorted(name for name in own_scopes if Path(name.rpartition(":")[0]).exists())
    if functions and not implementations:  # which run when they are named, and then nothing else does
        shipped = [i.id for i in load().values() if not i.opt_in] if scopes > own_scopes else []
        implementations = (*functions, *shipped)
    asked = Options(families=families, implementations=implementations, device=device, ledger=ledger, only=chosen)
    with tempfile.TemporaryDirectory() as folder, Shown() as progress:
        run = execute(dataclasses.replace(asked, reports=Path(folder)), progress, progress.say)
    about = run.header.header
    loose = {e.id for e in entries if "nondeterministic" in e.verdicts}
    for name in chosen:
        rows = [r for r in run.rows if r.frozen == name]
        now = recorded.of(rows, about.device or "cpu", about.versions, loose)
        state = "written" if recorded.save(files[name], now) else "as it was"
        new = sorted({r.implementation for r in rows if r.new})
        click.echo(f"{name}: {state}{', left out as it is new: ' + ', '.join(new) if new else ''}")
    for line in run.lost:
        options.say(f"parity: a worker was lost: {line}")
    ran = {r.implementation for r in run.rows}
    if missed := [e.id for e in its if e.id in names and not any(map(e.covers_implementation, ran))]:
        options.say(f"parity: {', '.join(missed)}: not measured, none of its implementations ran (--implementation)")
    sys.exit(NOTHING if run.lost or missed or not any(r.judged for r in run.rows) else 0)
