"""`parity audit --release`: the same audit in environments of several releases, side by side."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from parity.decoding import write
from parity.results.report import measured
from parity.results.report.markdown import code, escape
from parity.tools.audit.command import AGREE, NEW, NOTHING
from parity.tools.audit.table import COLOURS
from parity.tools.audit.verdicts import ANSWERS, FINDINGS

Row = Mapping[str, Any]


def audit_releases(specs: Sequence[str], argv: Sequence[str], reports: Path, console: Console) -> int:
    """Audit in the environment of each spec, print and write the table; the exit code of the last release that ran.

    A spec may name several packages, "trl==0.23.0,liger-kernel==0.6.5". `argv` is the audit's own command line
    (families, implementations, settings, cases). Each release leaves its rows under `reports`/audit/SPEC/; one whose
    environment cannot be made is a column that stays empty, with the reason on stderr. Exit code 3 when none was judged.
    """
    from parity.versions.commands.inside import described
    from parity.versions.env.client import EnvironmentUnusable
    from parity.versions.env.environment import Environment

    columns: dict[str, list[Row]] = {}
    last = NOTHING
    for spec in specs:
        folder = reports / "audit" / spec.replace("/", "_").replace(" ", "")
        try:
            made = Environment.of([part.strip() for part in spec.split(",")])
            click.echo(described(made), err=True)
            done = made.run(
                ["python", "-m", "parity", "audit", *argv, "--reports", str(folder.resolve())], capture=True
            )
        except EnvironmentUnusable as error:
            click.echo(f"parity: {error}", err=True)
            columns[f"{spec} (unusable)"] = []
            continue
        if done.returncode not in (AGREE, NEW):
            click.echo(done.stderr.strip() or f"{spec}: exit code {done.returncode}", err=True)
            columns[f"{spec} (exit {done.returncode})"] = []
            continue
        last = done.returncode
        columns[_label(spec, made.versions)] = read(folder / "audit.ndjson")
    tables = dict(across(columns))
    show(tables, list(columns), console)
    page = f"{measured.head('Settings audit by release', 'parity')}\n{markdown(tables, list(columns))}"
    write(reports / "audit-releases.md", page)
    console.print(f"\nreports in {reports}/: audit-releases.md, audit/; exit code {last}", markup=False)
    return last


def _label(spec: str, versions: Mapping[str, str]) -> str:
    """The release and the partner whose code it calls: "trl 0.28.0, liger-kernel 0.7.0"."""
    name = re.split(r"[=@ ]", spec.strip(), maxsplit=1)[0].lower().replace("_", "-")
    shown = [name] + [n for n in ("trl", "liger-kernel") if n != name and n in versions]
    return ", ".join(f"{n} {versions[n]}" if n in versions else spec for n in shown)


def read(file: Path) -> list[Row]:
    """The answers of one audit, without its header."""
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if "answer" in line]


Cells = dict[str, dict[str, Row]]


def across(columns: Mapping[str, Sequence[Row]]) -> Iterator[tuple[str, Cells]]:
    """Implementation -> setting -> release -> its answer; only settings that some release does not simply honour."""
    found: dict[str, Cells] = {}
    for release, rows in columns.items():
        for row in rows:
            found.setdefault(row["implementation"], {}).setdefault(row["label"], {})[release] = row
    for implementation, settings in found.items():
        kept = {label: by for label, by in settings.items() if {r["answer"] for r in by.values()} & set(_TELLING)}
        if kept:
            yield implementation, kept


_TELLING = tuple(a for a in ANSWERS if a not in ("honoured", "not run"))


def cell(row: Row | None) -> str:
    """ "ignored ×17.1 (trainer)": the answer, gradient norm over the definition's, where to repair."""
    if row is None:
        return ""
    if row["answer"] not in FINDINGS:
        return str(row["answer"])
    size = "" if row["gradient"] is None else f" ×{row['gradient']:.3g}"
    where = row["mend"].partition(":")[0]
    return f"{row['answer']}{size}" + (f" ({where})" if where else "")


def show(tables: Mapping[str, Cells], releases: Sequence[str], console: Console) -> None:
    """One table an implementation: settings down, releases across."""
    for implementation, settings in tables.items():
        console.print()
        console.print(Text(implementation, style="bold"))
        table = Table(box=None, pad_edge=False, header_style="bold")
        table.add_column("setting", overflow="fold", min_width=16)
        for release in releases:
            table.add_column(release.replace(", ", "\n"), overflow="fold")
        for label, by in settings.items():
            table.add_row(label, *(Text(cell(by.get(r)), style=_style(by.get(r))) for r in releases))
        console.print(table)


def _style(row: Row | None) -> str:
    return "" if row is None else COLOURS.get(row["answer"], "")


def markdown(tables: Mapping[str, Cells], releases: Sequence[str]) -> str:
    out: list[str] = []
    for implementation, settings in tables.items():
        heads = ["setting", *(escape(r).replace(", ", "<br>") for r in releases)]
        rows = ([escape(label), *(_bold(by.get(r)) for r in releases)] for label, by in settings.items())
        out += [f"## {code(implementation)}", "", *measured.table(heads, rows), ""]
    return "\n".join(out)


def _bold(row: Row | None) -> str:
    text = cell(row)
    if row is None or row["answer"] not in FINDINGS:
        return text
    return f"**{row['answer']}**{text[len(row['answer']) :]}"
