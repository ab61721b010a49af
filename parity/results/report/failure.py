"""The failure text of one implementation on one case: who is wrong, where, by how much, and the line that shows it."""

import io
import math
import re
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from parity.results.report import wording
from parity.results.report.findings import about_run, headroom, lead_of, roots_of
from parity.results.row import STOPPED, Row

COLOURS = {"agree": "green", "known": "yellow", "refused": "dim", "unsupported": "dim"}
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
LOUD = ("class", "wrong", "quantity")


def render_finding(rows: Sequence[Row], console: Console) -> None:
    """Print the failure text of one implementation on one case; `rows` are its rows, the ones that agree included.

    In this order: class, who is wrong, quantity, gate and headroom; every gate of every quantity; the worst five
    entries, decoded; hints; the replay line. Prints nothing where no row fails.
    """
    failing = [r for r in rows if r.failing]
    if not failing:
        return
    roots = roots_of(r for r in failing if r.verdict not in STOPPED)
    lead = lead_of([r for r in failing if r.verdict in STOPPED or r.quantity in roots] or failing)
    console.print(_grid(_head(lead)))
    judged = [r for r in rows if r.judged]
    # A relation, the protocol and a pooled slope are their own and only gate: beside the table, not in it.
    alone = [r for r in judged if list(r.gates) == [r.gate] and str(r.gate) in r.subject]
    measured = [r for r in judged if r not in alone]
    if judged:
        console.print()
    if measured:
        console.print(_gates(measured))
    if alone:
        console.print(_grid([(r.verdict, _alone(r)) for r in alone], 9))
    if lead.worst:
        console.print()
        console.print(_entries(lead))
    hints = wording.hints(rows, lead)
    if hints:
        console.print()
        console.print(_grid([("hint", text) for text in hints]))
    if lead.replay:
        console.print()
        # Soft-wrapped: the terminal may break it, but what is copied is one line.
        console.print(Text(f"replay   {lead.replay}", style="bold"), soft_wrap=True)


def render_rest(rows: Sequence[Row], console: Console) -> None:
    """Print one line of an implementation on one case where no row fails: agrees and how nearly, or why nothing was judged.

    Nothing where it has no rows: a check may be defined for some ways of using a trainer only.
    """
    if not rows or any(r.failing for r in rows):
        return
    judged = [r for r in rows if r.judged]
    if judged:
        worst = max(judged, key=headroom)
        size = f"largest headroom {headroom(worst):.2g} ({worst.quantity}, gate {worst.gate})"
        text = f"{len(judged)} {'quantity' if len(judged) == 1 else 'quantities'}, {size}"
        verdict = "agrees"
    else:
        row = max(rows, key=lambda r: r.verdict == "refused")
        verdict, text = row.verdict, row.message
    say(console, f"{verdict:<11} {rows[0].implementation} · {text}", COLOURS.get(verdict.removesuffix("s"), ""))


def text_of(rows: Sequence[Row], width: int = 110) -> str:
    """The failure text without colour."""
    out = io.StringIO()
    render_finding(rows, Console(file=out, width=width, color_system=None, highlight=False, legacy_windows=False))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def say(console: Console, text: str, style: str = "") -> None:
    """Plain text: what libraries write in messages must never be read as markup, nor an id be cut."""
    if text:
        console.print(Text(plain(text), style=style, overflow="fold"))


def _grid(lines: Iterable[tuple[str, str]], width: int = 8) -> Table:
    """Label and text, the text wrapped under itself."""
    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_column(min_width=width, no_wrap=True)
    grid.add_column(overflow="fold")
    for label, text in lines:
        grid.add_row(label, Text(plain(text), style="bold" if label in LOUD else "", overflow="fold"))
    return grid


def plain(text: str) -> str:
    """Text without control characters: a message must not colour, clear or retitle the reader's terminal."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


def _alone(row: Row) -> str:
    value = headroom(row)
    return row.subject + (f", headroom {wording.ratio(value)}" if 0 < value < math.inf else "")


def columns(title: str = "") -> Table:
    """A table without lines: what is copied into a mail stays readable."""
    table = Table(title=Text(title) if title else None, box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.title_justify, table.title_style, table.header_style = "left", "", ""
    return table


def _head(lead: Row) -> list[tuple[str, str]]:
    out = [("class", wording.cls(lead)), ("wrong", wording.wrong(lead))]
    if lead.verdict in STOPPED:
        out.append(("quantity", f"none: {lead.verdict} before there was anything to judge"))
    else:
        where = f"{lead.quantity}, gate {lead.gate}, headroom {wording.ratio(headroom(lead))} (above 1 fails)"
        flaky = "; the same call did not fail a second time" if lead.verdict == "nondeterministic" else ""
        out.append(("quantity", where + flaky))
        out.append(("sizes", wording.sizes(lead)))
    out.append(("case", f"{lead.case} · {lead.dtype} · {lead.device}"))
    if not about_run(lead):
        out.append(("settings", wording.settings(lead.settings)))
    if lead.recipe:
        out.append(("recipe", lead.recipe))
    if lead.known:
        out.append(("known", lead.known))
    return out


def _gates(rows: Sequence[Row]) -> Table:
    gates = wording.gates(rows)
    table = columns("headroom of every gate")
    table.add_column("quantity", overflow="fold", min_width=min(max(len(r.subject) for r in rows), 20))
    table.add_column("verdict", overflow="fold", min_width=8)
    for gate in gates:
        table.add_column(gate, justify="right", no_wrap=True)
    for row in rows:
        style = COLOURS["agree"] if row.verdict == "agree" else COLOURS["known"] if row.known else "red"
        table.add_row(Text(row.subject), Text(row.verdict, style=style), *(_gate(row, gate) for gate in gates))
    return table


def _gate(row: Row, gate: str) -> Text:
    if gate not in row.gates:
        return Text("")
    found = row.gates[gate]
    value = math.inf if found is None else found
    return Text(wording.ratio(value), style="" if value <= 1 else "bold red")


def _entries(lead: Row) -> Table:
    headings, cells = wording.entries(lead)
    table = columns(f"worst entries of {lead.quantity}")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for line in cells:
        table.add_row(*map(Text, line))
    return table
