"""The commands of the gate: `parity nightly`, `notify`, `upgrade-check`."""

import datetime
import sys
from pathlib import Path
from typing import Any

import click

from parity.cli import options
from parity.cli.progress import Shown
from parity.cli.show import report
from parity.decoding import write
from parity.errors import UsageError


@click.command("nightly", epilog="Example: parity nightly --max-time 2h")
@options.time("--max-time", "for everything: 6h, 90m, 1h30m", "6h")
@options.option("--profile", "how much the long run does", "nightly")
@options.FAMILIES
@options.IMPLEMENTATIONS
@options.DEVICE
@options.option("--seed", "default: a new one, which is printed", type=int)
@options.LEDGER
@click.option("--skip", multiple=True, metavar="NAME", help="leave out history, mutants, upstream or unsloth")
@click.option("--with", "specs", multiple=True, metavar="PKG==VER", help="judge this release too")
@click.option("--resume", is_flag=True, help="continue a night that was killed")
@options.RAY
@options.REPORTS
def nightly_command(skip: tuple[str, ...], specs: tuple[str, ...], resume: bool, **options: Any) -> None:
    """Run everything for some hours, and write one page.

    First the harness must catch a wrong implementation. Then a long run with new cases, failures of older releases and more.
    """
    from parity.nightly.night import COMMANDS, run
    from parity.results.notify import title
    from parity.results.report.rows import read
    from parity.running.plan import Options

    if unknown := set(skip) - {o[0] for o in COMMANDS}:
        raise UsageError(f"--skip {sorted(unknown)[0]!r}: choose from {', '.join(o[0] for o in COMMANDS)}")
    words = ["run", "--profile", options["profile"], *(word for n in options["families"] for word in ("--family", n))]
    libraries = [name for name in options["implementations"] if ".py:" not in name]
    words += [word for name in libraries for word in ("--implementation", name)]
    others = [o for o in COMMANDS if o[0] not in skip] + [(spec, (*words, "--with", spec), 0.1) for spec in specs]
    results = options["reports"] / "results.ndjson"
    night = Options(resume=results if resume else None, **options)
    with Shown() as progress:
        code, changed = run(night, progress.say, progress, others)
    if changed is not None:
        report(*read(results), results, night.reports, list(changed.run.reasons), code)
        click.echo(title(changed))
    sys.exit(code)


@click.command("notify", epilog="Example: parity notify --out issue.md")
@options.time("--stale", "red if the last run is older than this", "36h")
@options.option("--profile", "only runs of this profile count", "nightly")
@click.option("--page", default="", metavar="LINK", help="link to the report, for the text")
@options.path("--out", "file for the text of the issue")
@options.path("--trend", "write findings by release over time", metavar="FILE.html")
@options.REPORTS
def notify_command(stale: float, profile: str, page: str, out: Path | None, trend: Path | None, reports: Path) -> None:
    """Write the text of an issue about the last night.

    Prints its title. Exit code: 0 green, close the issue; 1 red, open or update it; 3 no run within --stale, or the last
    night died.
    """
    from parity.nightly.journal import standing
    from parity.results import memory, notify
    from parity.results import trend as trends

    past = memory.runs(reports / "history", lambda line: options.say(f"parity: {line}"))
    past = [run for run in past if run.profile == profile]
    under_way, lost = standing(reports, profile, {run.id for run in past})
    past = [run for run in past if run.id != under_way]
    late = trends.stale(past, datetime.timedelta(seconds=stale), datetime.datetime.now(datetime.UTC))
    if lost or late:
        text = f"parity: no night: {lost or late.replace('such run', f'run of profile {profile}')}"
        body = f"**{text}**\n\n" + ("" if lost else "The machine, its timer or its runner is down.\n")
        code = 3
    else:
        changed = trends.change(past[-1], past[:-1])
        text, body, code = notify.title(changed), notify.body(changed, page), 0 if changed.run.green else 1
    if out is not None:
        out.write_text(body, encoding="utf-8")
    if trend is not None and past:
        from parity.results.ledger import Ledger
        from parity.results.report.render import trend_page

        write(trend, trend_page([r for r in past if r.device == past[-1].device], Ledger.known(), page))
    click.echo(text if out is not None else f"{text}\n{body}")
    sys.exit(code)


@click.command("upgrade-check", epilog="Example: parity upgrade-check trl==1.16.0 --config config.yaml")
@click.argument("spec", metavar="PKG==VER|PKG==NEXT")
@options.path("--config", "your TRL arguments: YAML or JSON")
@click.option("--trainer", metavar="CLASS", help="with --config: the trainer, where the settings fit several")
@options.time("--max-time", "for each of run and compare", "1h")
@options.device("auto")
@options.REPORTS
def upgrade_check_command(
    spec: str, config: Path | None, trainer: str | None, max_time: float, device: str, reports: Path
) -> None:
    """Say whether it is safe to upgrade to a release.

    Does `run` and `compare` with that release, and writes one page. With --config the verdict is about your run: GRPO's
    settings and values near them, or the checks of another trainer, and the fields of its config class. Exit code: 0
    safe, 1 not safe, 3 not known.
    """
    from parity.nightly import upgrade

    folder, spec = reports / "upgrade", upgrade.resolved(spec)
    found, parts = upgrade.check(spec, config, folder, options.say, device, max_time, trainer)
    write(folder / "upgrade.md", upgrade.page(spec, parts))
    for part in parts:
        click.echo(f"{part.name}: {part.verdict}: {part.summary}")
    click.echo(f"{upgrade.headline(spec, parts)} ({folder / 'upgrade.md'})")
    sys.exit(upgrade.CODES[found])


COMMANDS = (nightly_command, notify_command, upgrade_check_command)
