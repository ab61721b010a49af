"""The audit as tables: for the terminal, as Markdown, and as rows."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from parity.results.report import measured
from parity.results.report.markdown import code, escape
from parity.tools.audit.source_lines import NOT_READ
from parity.tools.audit.verdicts import ANSWERS, Answer

HEADINGS = ("setting", "reference", "candidate", "effect", "silent", "mend", "known")
WIDTHS = {"setting": 20, "reference": 20, "candidate": 20, "effect": 15, "silent": 6, "mend": 7, "known": 5}
"""Least columns on a terminal: a file and line is not broken."""
COLOURS = {"ignored": "bold red", "wrong": "bold red", "crashed": "bold red", "refused": "yellow", "absent": "dim"}


@dataclasses.dataclass(frozen=True)
class Line:
    """One setting of one implementation beside the reference of its family."""

    answer: Answer
    reference: Answer | None
    mend: str

    def cells(self, short: bool = False) -> tuple[str, ...]:
        """As under `HEADINGS`; `short` leaves out folders, and what a reader looks up in the Markdown."""
        one = self.answer
        known = ", ".join(one.known) or ("new" if one.new else "")
        silent = "" if one.silent is None else "yes" if one.silent else "no"
        beside = "" if self.reference is None else _behaviour(self.reference, short, reasons=not short)
        mend = self.mend.partition(":")[0] if short else self.mend
        worth = effect(one).replace(", ", "\n") if short else effect(one)
        return one.probe.label, beside, _behaviour(one, short), worth, silent, mend, known


def _behaviour(one: Answer, short: bool, reasons: bool = True) -> str:
    parts = [one.answer, *(f"{name} wrong" for name in one.metrics)]
    parts += ["disagrees without it too"] if one.also_without else []
    if one.place and not (short and one.answer == "absent"):
        folder, _, file = one.place.rpartition("/")
        said = NOT_READ if folder.startswith(NOT_READ) else ""
        parts.append(said + file if short else one.place)
    if reasons and one.answer in ("refused", "crashed", "absent", "not run"):
        parts.append(textwrap.shorten(one.reason, 90, placeholder="…") if short else one.reason)
    return "; ".join(parts)


def effect(one: Answer) -> str:
    """Loss and gradient norm over the definition's; for what did not run, what the setting is worth by definition."""
    if one.answer == "not run":
        return ""
    if one.answer in ("refused", "crashed", "absent"):
        pair = _times(one.moved_loss, one.moved_gradient)
        return f"by definition {pair}" if pair else ""
    if one.answer == "honoured":
        return ""
    return _times(one.loss, one.gradient) or "not finite"


def _times(loss: float | None, gradient: float | None) -> str:
    named = (("loss", loss), ("gradient", gradient))
    return ", ".join(f"{name} ×{value:.3g}" for name, value in named if value is not None)


def lines(answers: Sequence[Answer], repairs: Mapping[int, str]) -> Iterator[tuple[str, str, list[Line]]]:
    """(family, implementation, its lines), references first, in the order of the answers."""
    references = {(a.family, a.probe.label): a for a in answers if a.role == "reference"}
    groups: dict[tuple[str, str], list[Line]] = {}
    for number, one in enumerate(answers):
        reference = None if one.role == "reference" else references.get((one.family, one.probe.label))
        groups.setdefault((one.family, one.implementation), []).append(Line(one, reference, repairs.get(number, "")))
    for (family, implementation), found in sorted(
        groups.items(), key=lambda g: (g[0][0], g[1][0].answer.role != "reference")
    ):
        yield family, implementation, found


@dataclasses.dataclass(frozen=True)
class Parts:
    """The lines of one implementation: those worth a row, and labels of the others by why they are not."""

    shown: list[Line]
    honoured: list[str]
    without: list[str]
    idle: dict[str, list[str]]

    @classmethod
    def of(cls, found: Iterable[Line]) -> Parts:
        """Sort the lines: what is new first, then by answer; a setting that the whole release lacks is no row."""
        out = cls([], [], [], {})
        for line in found:
            one, reference = line.answer, line.reference
            if one.answer == "honoured" and not one.metrics:
                out.honoured.append(one.probe.label)
            elif one.answer == "not run":
                out.idle.setdefault(one.reason, []).append(one.probe.label)
            elif one.answer == "absent" and (one.role == "reference" or (reference and reference.answer == "absent")):
                out.without.append(one.probe.label)
            else:
                out.shown.append(line)
        out.shown.sort(key=lambda line: (not line.answer.new, ANSWERS.index(line.answer.answer)))
        return out

    def remarks(self) -> Iterator[str]:
        """A line of text for each group that has no rows."""
        if self.honoured:
            yield f"honoured: {', '.join(self.honoured)}"
        if self.without:
            yield f"not in this release: {', '.join(self.without)}"
        for reason, labels in self.idle.items():
            yield f"not run: {reason}: {_listed(labels)}"


def _listed(labels: Sequence[str]) -> str:
    return ", ".join(labels) if len(labels) <= 6 else f"{len(labels)} settings"


def counts(answers: Iterable[Answer]) -> str:
    """How many (implementation, setting) pairs have each answer."""
    found = [a.answer for a in answers]
    return " · ".join(f"{found.count(kind)} {kind}" for kind in ANSWERS)


def show(answers: Sequence[Answer], repairs: Mapping[int, str], console: Console) -> None:
    """Print the counts, then for each implementation what is not simply honoured."""
    console.print(Text(counts(answers), style="bold"))
    for family, implementation, found in lines(answers, repairs):
        parts = Parts.of(found)
        console.print()
        console.print(Text(f"{family} · {implementation}", style="bold"))
        if parts.shown:
            console.print(_table(parts.shown, found[0].answer.role == "reference"))
        for remark in parts.remarks():
            console.print(Text(remark, style="dim"))


def _table(shown: Sequence[Line], reference: bool) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    kept = [i for i, heading in enumerate(HEADINGS) if not (reference and heading == "reference")]
    for i in kept:
        name = "behaviour" if reference and HEADINGS[i] == "candidate" else HEADINGS[i]
        table.add_column(name, overflow="fold", min_width=WIDTHS[HEADINGS[i]])
    for line in shown:
        cells = line.cells(short=True)
        style = COLOURS.get(line.answer.answer, "") if line.answer.new or line.answer.answer == "refused" else "dim"
        table.add_row(*(Text(cells[i]) for i in kept), style=style)
    return table


def markdown(answers: Sequence[Answer], repairs: Mapping[int, str], versions: str) -> str:
    """The same as Markdown, as one posts it in an issue."""
    out = [f"{escape(versions)}", "", f"**{escape(counts(answers))}**", ""]
    for family, implementation, found in lines(answers, repairs):
        parts = Parts.of(found)
        out += [f"## {family}: {code(implementation)}", ""]
        if parts.shown:
            out += [*measured.table(HEADINGS, (map(escape, line.cells()) for line in parts.shown)), ""]
        for remark in parts.remarks():
            out += [escape(remark[0].upper() + remark[1:]) + ".", ""]
    return "\n".join(out)


def row(one: Answer, mend: str) -> dict[str, Any]:
    """One answer as a JSON object; its case can be given to `parity replay`."""
    plain = {f.name: getattr(one, f.name) for f in dataclasses.fields(one) if f.name not in ("probe", "case", "gates")}
    return plain | {
        "setting": one.probe.setting,
        "value": one.probe.value,
        "label": one.probe.label,
        "gates": dict(one.gates),
        "case": None if one.case is None else one.case.to_json(),
        "metrics": list(one.metrics),
        "known": list(one.known),
        "new": one.new,
        "mend": mend,
    }
