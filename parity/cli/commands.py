"""The commands of `parity` and their options. What each does is in the module that it calls; exit codes: `parity.errors`."""

import collections
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from parity.cli import nightly, options, rollouts, versions
from parity.cli.group import Group, console
from parity.cli.ledger_commands import ledger_command
from parity.cli.progress import Shown
from parity.cli.show import VERBOSE, findings, report
from parity.errors import INTERRUPTED, NOTHING, TERMINATED, UsageError
from parity.results.report import PAGES


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="llm-parity", prog_name="parity")
def main() -> None:
    """Compare LLM post-training losses with their definition.

    Says who is wrong, in which quantity, and by how much.
    """


@main.command("run", epilog="Example: parity run --profile quick --family policy")
@options.option("--profile", "how much to do: quick, pr, nightly or soak", "pr")
@options.FAMILIES
@options.IMPLEMENTATIONS
@options.several("--dtype", "dtypes", "fp32, fp16 or bf16")
@options.DEVICE
@options.option("--seed", "of the random cases; default: fixed in quick and pr, else new", type=int)
@options.with_versions
@click.option("--require", multiple=True, metavar="ID[:cpu|cuda]", help="exit code 3 unless this was compared")
@options.LEDGER
@options.path("--results", "file for the results; default: results.ndjson in --reports")
@options.REPORTS
@options.count("--workers", "processes; default: one for each core, if memory allows")
@options.RAY
@click.option("--minimise/--no-minimise", default=True, help="look for smaller cases of new findings at the end")
@options.path("--resume", "continue the run that wrote this file", metavar="RESULTS")
@options.time("--max-time", "stop after 2h, 90m or the like; frozen cases come first, all of them")
@VERBOSE
def run_command(verbose: bool, **options: Any) -> None:
    """Run every implementation on many cases, judge, and report.

    Exit code: 0 nothing new, 1 a new finding, 3 nothing was compared, 4 a known finding no longer happens.
    """
    from parity.running.run import Options, execute

    with Shown() as progress:
        result = execute(Options(**options), progress, progress.say)
    done = result.options
    whole = not (done.families or done.implementations or done.dtypes or options["max_time"])
    report(result.header, result.rows, done.file, done.reports, result.reasons, result.exit_code, verbose, keep=whole)
    sys.exit(result.exit_code)


@main.command("demo", epilog="Example: parity demo")
@options.path("--reports", "folder for the losses and the page", "reports/demo")
def demo_command(reports: Path) -> None:
    """Run a right loss and a wrong one, and show the finding.

    Half a minute, without TRL and Liger. Exit code: 0 if the wrong one alone was found.
    """
    from parity.cli.demo import demo

    sys.exit(demo(reports, console()))


@main.command("init", epilog="Example: parity init my_kernel.py:my_loss")
@click.argument("loss", required=False, metavar="[FILE.py:NAME]")
def init_command(loss: str | None) -> None:
    """Write a first test and a workflow into a repository.

    The test judges a kernel. With FILE.py:NAME, your own loss, the workflow also runs it on random cases in each pull request,
    with your own list of known findings. Existing files stay unchanged.
    """
    from parity.cli.init import init

    init(Path.cwd(), loss)


@main.command("list", epilog="Example: parity list --family policy")
@options.FAMILIES
@options.option(
    "--settings", "settings of this family; for a results file, the verdicts with each", metavar="FAMILY|RESULTS"
)
@options.option("--checks", "the checks of this trainer", metavar="TRAINER")
def list_command(families: tuple[str, ...], **sections: Any) -> None:
    """List implementations, settings, or checks of a trainer.

    Each implementation is shown with its version, or with the reason why it cannot run here.
    """
    from parity.cli import listing

    chosen = {name: value for name, value in {"implementations": families, **sections}.items() if value}
    if len(chosen) > 1:
        raise UsageError("list: use one of --family, --settings, --checks")
    for name, value in (chosen or {"implementations": ()}).items():
        getattr(listing, name)(value, console())


@main.command("doctor", epilog="Example: parity doctor")
def doctor_command() -> None:
    """Show what is installed, can run, or is missing."""
    from parity.cli.doctor import diagnose

    sys.exit(0 if diagnose(console()) else NOTHING)


@main.command("replay", epilog="Example: parity replay liger-luspo-padding")
@click.argument("case")
@options.OWN_FAMILY
@options.IMPLEMENTATIONS
@options.DEVICE
@options.with_versions
@click.option("--issue", is_flag=True, help="print a bug report for upstream; for a ledger entry with its script")
@options.path("--test", "write a pytest for your repository that runs this case again", metavar="FILE.py")
@options.path("--minimise", "write the smallest part of a captured batch that still disagrees", metavar="FILE")
@options.path("--reports", "folder or results file of the run that had the case", "reports")
def replay_command(case: str, **options: Any) -> None:
    """Run one case again and show every number.

    CASE is a case file, a ledger entry, or the id of a case. Exit code: 0 agrees, 1 disagrees, 125 not judged.
    """
    from parity.tools.replay import replay

    def explained(run: Callable[[], object]) -> Sequence[str]:
        from parity.watching.replayed import said  # transformers

        return said(run)

    sys.exit(replay(case, console=console(), explained=explained, **options))


@main.command("findings", epilog="Example: parity findings --config grpo.yaml")
@options.path("--config", "only those that the settings of this .yaml or .json file meet")
@click.option("--trainer", help="class of the trainer, such as GRPOTrainer, if the file does not name it")
@options.LEDGER
@click.option("--page", type=click.Choice(PAGES), help="print the page of docs/ instead")
def findings_command(config: Path | None, trainer: str | None, ledger: Path | None, page: str | None) -> None:
    """Show what is known to be wrong in the installed libraries.

    Most severe first. --config keeps what applies to a training run; exit code 1 if something does for certain.
    """
    from parity.results.ledger import Ledger
    from parity.results.report.stack import Stack

    known = Ledger.known(ledger)
    if page:
        from parity.results.report import render

        click.echo(render.ledger_page(known, page), nl=False)
        return
    if not config:
        stack = Stack.here(known)
        findings(f"{stack.named}: {stack.defects}", stack, {})
        return
    from parity.tools.settings_check import advice, run_of

    run = run_of(config, trainer, known)
    if run.unread:
        options.say(f"{config}: no settings of {run.trainers[0]}: {', '.join(run.unread)}")
    found = advice(run, known)
    findings(found.title, found.stack, found.conditions)
    for name, ids in found.absent.items():
        options.say(f"{config} has no {name}: add it to be told of {', '.join(ids)}")
    sys.exit(int(bool(found)))


@main.command("upstream", epilog="Example: parity upstream liger-luspo-padding")
@click.argument("ids", nargs=-1, metavar="[ID]...")
@click.option("--all", "every", is_flag=True, help="every entry of the ledger")
@options.LEDGER
@options.REPORTS
@options.count("--workers", "processes", 2)
@options.with_versions
def upstream_command(ids: tuple[str, ...], every: bool, ledger: Path | None, reports: Path, workers: int) -> None:
    """Write bug reports for known findings, and test them.

    ID is an entry of the ledger. Each gets reports/upstream/ID/ with a text, a script that needs only the library, and a
    patch. Each script is run, and run again with the patch. Exit code: 0 if every script shows its defect and the patch
    removes it, else 1.
    """
    from parity import data
    from parity.tools.upstream import upstream

    if bool(ids) == every:
        raise UsageError("upstream: name entries of the ledger, or --all")
    ends = collections.Counter[str]()
    for found in upstream(ids, ledger or data.ledger_file(), reports / "upstream", workers):
        ends["wrong" if not found.right else "not run" if found.done is None else "right"] += 1
        click.echo(f"{found.entry.id}: {'' if found.right else 'WRONG: '}{found.outcome}")
    told = ", ".join(f"{ends[end]} {end}" for end in ("right", "wrong", "not run"))
    click.echo(f"{ends.total()} entries: {told}")
    sys.exit(int(ends["wrong"] > 0))


@main.command("report", epilog="Example: parity report nightly/results.ndjson -v")
@click.argument("file", default="reports/results.ndjson", type=options.PATH, metavar="[RESULTS]")
@options.path("--reports", "folder for reports; default: where the results file is")
@options.path("--against", "print what changed since the run of this results file, as Markdown", metavar="BASE")
@VERBOSE
def report_command(file: Path, reports: Path | None, against: Path | None, verbose: bool) -> None:
    """Report a results file again (default: of the last run)."""
    from parity.results import memory
    from parity.results.report.rows import read
    from parity.results.row import End

    header, rows = read(file)
    if against:
        from parity.versions.row_diff import comment

        click.echo(comment(read(against), (header, rows)), nl=False)
        return
    end, told = (header.end.exit_code, header.end.reasons) if isinstance(header.end, End) else (None, [])
    stopped = header.interrupted is True if end is None else end in (NOTHING, INTERRUPTED, TERMINATED)
    code = NOTHING if stopped else 0
    ended = (code or int(any(row.new for row in rows))) if end is None else end
    past = memory.runs(file.parent / "history", lambda line: options.say(f"parity: {line}"))
    kept = next((run for run in past if run.id == header.run), None)  # a night may be graver
    ended, reasons = (kept.exit_code, kept.reasons) if kept else (ended, told)
    report(header, rows, file, reports or file.parent, reasons, ended, verbose)
    sys.exit(code)


for _command in (*versions.COMMANDS, *nightly.COMMANDS, ledger_command, rollouts.rollouts):
    main.add_command(_command)
