"""The matrix on a terminal and as one self-contained HTML page, coloured by headroom."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import jinja2
from rich.console import Console
from rich.table import Table
from rich.text import Text

from parity import decoding
from parity.versions.commands.matrix import Cell, Line

TEMPLATE = Path(__file__).with_name("matrix.html.j2")
BANDS = ((0.5, "easy", "green"), (1.0, "near", "yellow"), (10.0, "over", "red"), (math.inf, "far", "bold red"))
"""Headroom up to -> class in the page, colour on the terminal; 1 is the gate."""
SHORT = {"refused": "refused", "unsupported": "–", "crashed": "crashed", "nondeterministic": "flaky"}
LEGEND = (
    "headroom, the share of a gate that is used: above 1 is wrong; inf: a NaN, a missing gradient, or a value where the "
    "mask implies 0; *: known, in the ledger; –: unsupported"
)


def shown(cell: Cell | None) -> str:
    if cell is None:
        return "–"
    return _level(cell) + ("*" if cell.known else "")


def _level(cell: Cell) -> str:
    if cell.verdict not in ("agree", "disagree"):
        return SHORT.get(cell.verdict, cell.verdict)
    level = cell.headroom
    return "inf" if level is None else f"{level:.2f}" if level < 10 else f"{level:.2g}"


def band(cell: Cell | None) -> tuple[str, str]:
    """Class and colour of a cell."""
    if cell is None or cell.verdict in ("unsupported", "refused"):
        return "none", "dim"
    if cell.verdict == "crashed" or cell.headroom is None:
        return BANDS[-1][1:]
    return next((name, colour) for limit, name, colour in BANDS if cell.headroom <= limit)


def axes(lines: Sequence[Line]) -> tuple[list[str], list[str]]:
    """Implementations and columns, in the order run; implementations that nothing judged anywhere are left out."""
    found = {key: cell for line in lines for key, cell in line.cells.items()}
    spoke = {k[0] for line in lines for k, c in line.cells.items() if c.verdict != "unsupported"}
    return [i for i in dict.fromkeys(k[0] for k in found) if i in spoke], list(dict.fromkeys(k[1] for k in found))


def render(package: str, lines: Sequence[Line], console: Console) -> None:
    """Print a table an implementation: releases down, columns across."""
    implementations, columns = axes(lines)
    for implementation in implementations:
        table = Table(title=implementation, title_justify="left", title_style="bold", box=None, padding=(0, 1))
        table.add_column(package, no_wrap=True)
        for column in columns:
            table.add_column(column, justify="right", no_wrap=True)
        for line in lines:
            if not line.unusable:
                cells = [line.cells.get((implementation, column)) for column in columns]
                table.add_row(line.version, *(Text(shown(c), style=band(c)[1]) for c in cells))
        console.print(table)
        console.print()
    for line in lines:
        if line.unusable:
            console.print(f"not judged: {package} {line.version}: {line.unusable}", markup=False)
    console.print(LEGEND, style="dim", markup=False)


def write(package: str, name: str, lines: Sequence[Line], path: Path) -> None:
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    implementations, columns = axes(lines)
    page = environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        package=package,
        family=name,
        lines=lines,
        implementations=implementations,
        columns=columns,
        shown=shown,
        band=band,
        legend=LEGEND,
    )
    decoding.write(path, page)
