"""What a run shows while it goes on, and what it writes at its end."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import click

from parity.cli.group import console
from parity.results.header import Header
from parity.results.row import Row


def progress() -> Callable[[list[Row], int, int], None]:
    """A line on stderr: rewritten on a terminal, a new one every 20 s elsewhere."""
    terminal, begun = sys.stderr.isatty(), time.monotonic()
    last = [begun if not terminal else 0.0]

    def show(rows: list[Row], done: int, of: int) -> None:
        now = time.monotonic()
        if now - last[0] < (0.2 if terminal else 20.0):
            return
        last[0] = now
        failing = len({r.implementation for r in rows if r.new})
        parts = [f"{now - begun:5.0f} s", f"case {done:,} of {of:,} ({done / max(of, 1):.0%})"]
        if done:
            parts.append(f"about {max(0.0, (now - begun) * (of - done) / done):.0f} s left")
        if rows:
            parts.append(f"{rows[-1].implementation}")
        parts.append(f"{failing} implementation{'s' if failing != 1 else ''} with new findings")
        text = ", ".join(parts)
        click.echo(f"\r{text[:119]}\033[K" if terminal else text, err=True, nl=not terminal)

    return show


def report(header: Header, rows: list[Row], folder: Path, reasons: list[str], code: int) -> None:
    from parity.results.report import html, junit, markdown, terminal
    from parity.results.report.summary import summarise

    summary = summarise(header, rows)
    folder.mkdir(parents=True, exist_ok=True)
    junit.write(summary, folder / "junit.xml")  # files first: whoever reads the terminal may stop reading
    markdown.write(summary, folder / "summary.md")
    html.write(summary, folder / "index.html")
    screen = console()
    terminal.render(summary, screen)
    for reason in reasons:
        screen.print(reason, markup=False)
    screen.print(
        f"reports in {folder}/: results.ndjson, index.html, summary.md, junit.xml; exit code {code}", markup=False
    )
