"""`parity list`: implementations, settings and checks, as tables."""

import collections
import inspect
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from parity.case.family import Family
from parity.cli.show import table_of
from parity.errors import UsageError
from parity.registry import family, load, loss_families, loss_family, meant, resolved
from parity.results.report.findings import ImplementationCase, grouped
from parity.results.report.rows import read
from parity.results.row import DECLINED, Row
from parity.trainers import catalogue
from parity.trainers.specs import TRAINERS

DRAWN, SMALL = 60, 100
"""Drawn cases of which those whose sizes are small have every tensor of a family."""


def implementations(families: Iterable[str], console: Console) -> None:
    """A table for each family, references first: id, role, and the library's version or why it cannot run."""
    chosen = tuple(map(resolved, families)) or (*loss_families(), *TRAINERS)
    every = [i for i in load().values() if i.family in chosen]
    every.sort(key=lambda i: (chosen.index(i.family), i.role != "reference", i.id))
    wide = max((len(i.id) for i in every), default=0)
    can = 0
    for number, (name, group) in enumerate(itertools.groupby(every, key=lambda i: i.family)):
        table = table_of(("\n" if number else "") + name, ("", "", ""), show_header=False)
        for column, width in zip(table.columns, (wide + 2, 9, None), strict=True):
            column.no_wrap, column.min_width = width is not None, width
        for i in group:
            missing = i.missing()
            can += not missing
            notes = [n for n, there in (("only if named", i.opt_in), ("Triton", i.interpreted)) if there]
            version = f"{i.library} {i.version() or ''}".strip() if i.library else "parity"
            last = str(missing).partition(":")[0] if missing else ", ".join([version, *notes])
            role = "reference" if i.role == "reference" else ""
            table.add_row(Text(f"  {i.id}"), role, last, style="dim" if missing else "")
        console.print(table)
    more = "Settings: parity list --settings policy; checks of a trainer: parity list --checks dpo-trainer"
    console.print(f"\n{can} of {len(every)} can run here. {more}", markup=False)


def settings(name: str, console: Console) -> None:
    """The settings of a loss family, or of a trainer's checks; of a results file, what came out with each."""
    if Path(name).is_file():
        _judged(read(Path(name))[1], console)
        return
    name = resolved(name)
    found = family(name)
    if isinstance(found, catalogue.TrainerFamily):
        _show(f"settings of {name}", ("check", "name", "default", "meaning"), _of_checks(found), console)
        return
    rows = [
        (k, s.default, _with(s.doc, values=s.choices, within=[s.within] if s.within else None))
        for k, s in found.settings.items()
    ]
    _show(f"settings of {name}", ("name", "default", "meaning"), rows, console)
    if name in loss_families():
        fam = loss_family(name)
        defined = inspect.getmodule(fam.oracle)
        text = ((defined and defined.__doc__) or "").strip()
        console.print(Text("\n" + re.sub(r"(?<!\n)\n(?![ \n])", " ", text)))  # paragraphs; formulas stay lines
        console.print(Text(f"\ntensors, by the name of a function's parameter: {', '.join(_tensors(fam))}"))
        more = f", or ({fam.first}, {{name: value}}) with any of: {', '.join(sorted(fam.optional))}" * bool(
            fam.optional
        )
        console.print(Text(f"a function returns {fam.first}{more}"))


def _of_checks(trainer: catalogue.TrainerFamily) -> Iterator[tuple[Any, ...]]:
    """The settings that the trainer's cases move, by check, with the values that they have there."""
    every = catalogue.cases(trainer.name, "nightly", 0)
    for check in trainer.checks.values():
        its = [case.settings for case in every if case.settings["check"] == check.name]
        for name, setting in check.settings.items():
            values = {repr(v): v for s in its for v in [s.get(name, setting.default)]}
            if len(values) > 1:
                yield check.name, name, setting.default, _with(setting.doc, values=[*values.values()])


def _tensors(fam: Family) -> list[str]:
    """The tensors of a family's cases, each with its shape in names of sizes, as drawn cases have them."""
    from parity.case import drawing  # Hypothesis

    sizes: dict[tuple[str, int], list[set[str]]] = {}
    for case in drawing.draws(drawing.cases(fam, ("fp32",), "quick"), "tensors", DRAWN):
        settings = fam.full_settings(case)
        if max(getattr(settings, name) for name in fam.shapes) > SMALL:
            continue
        x = fam.build(case)
        for name, tensor in x.tensors.items():
            if tensor is not None:
                fit = [{s for s in fam.shapes if getattr(x.settings, s) == size} for size in tensor.shape]
                one = name, tensor.dim()
                sizes[one] = [a & b for a, b in zip(sizes.get(one, fit), fit, strict=True)]
    shapes = collections.defaultdict[str, list[str]](list)
    for (name, _), shape in sorted(sizes.items()):
        shapes[name].append(f"({', '.join(min(fit, default='…') for fit in shape)})")
    return [f"{name} {' or '.join(found)}" for name, found in shapes.items()]


def _judged(rows: Iterable[Row], console: Console) -> None:
    """For each implementation and setting: on how many cases that move it the implementation was compared, and the
    answers. A case moves a setting only where that has an effect (`Family.canonical`). Not taken: no case with it was
    compared, but another implementation of the family had one."""
    moved = collections.defaultdict[tuple[str, str], dict[str, list[ImplementationCase]]](dict)
    for case in grouped(rows):
        name, one = case.first.family, case.first.implementation
        sizes = loss_family(name).shapes if name in loss_families() else ()
        for setting in case.first.settings.keys() - {*sizes}:
            moved[name, one].setdefault(setting, []).extend([case] * (case.outcome not in DECLINED))
    for (name, one), cases in sorted(moved.items()):
        console.print(Text(f"{name}: {one}", style="bold"))
        told: dict[str, list[str]] = {}
        for setting in sorted({s for (other, _), found in moved.items() if other == name for s in found}):
            wrong = [case for case in cases.get(setting, ()) if case.failing]
            new, count = sum(any(r.new for r in case.failing) for case in wrong), len(cases.get(setting, ()))
            said, answer = setting, "disagree" if wrong else "agree" if count else "not taken"
            if count:
                said += f" {len(wrong)} of {count}" + f" ({new} new)" * bool(new) if wrong else f" {count}"
            told.setdefault(answer, []).append(said)
        for answer in sorted(told):
            console.print(Text(f"  {answer}: {', '.join(told[answer])}"))


def checks(name: str, console: Console) -> None:
    """The checks of a trainer. Raises UsageError for what is no trainer."""
    if not catalogue.is_trainer(name):
        raise UsageError(f"trainer {name!r} is unknown, {meant(name, catalogue.TRAINERS)}")
    profiles = ("quick", "pr", "nightly")
    counted = [[c.settings["check"] for c in catalogue.cases(name, profile, 0)] for profile in profiles]
    rows = []
    for one in catalogue.family(name).checks.values():
        meaning = _with(one.doc, run_as=one.paths, settings=one.settings)
        rows.append((one.name, *(names.count(one.name) for names in counted), meaning))
    _show(f"checks of {name}", ("name", *profiles, "meaning"), rows, console)


def _with(meaning: str, **more: Iterable[Any] | None) -> str:
    """A meaning, and behind it what is long."""
    said = [f"{name.replace('_', ' ')}: {', '.join(map(str, given))}" for name, given in more.items() if given]
    return "; ".join([meaning.rstrip(".") if said else meaning, *said])


def _show(title: str, headings: Sequence[str], rows: Iterable[Sequence[Any]], console: Console) -> None:
    table = table_of(title, headings)
    for row in rows:
        table.add_row(*(Text("" if v is None else f"{v:,}" if type(v) is int else str(v)) for v in row))
    for column in table.columns[:-1]:
        column.max_width = 24
    console.print(table)
