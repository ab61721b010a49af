"""`parity list`: implementations, settings, checks, profiles and trainers without a check, from the registry."""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from parity.errors import UsageError
from parity.registry import family, load, loss_families, meant, resolved
from parity.results.json_output import (
    CheckOut,
    CoveredOut,
    ImplementationOut,
    ProfileOut,
    SettingOut,
    filled,
)
from parity.trainers import catalogue


def implementations(families: Iterable[str] = ()) -> list[ImplementationOut]:
    """Every implementation, by family, references first.

    Raises:
        UsageError: for a family that does not exist.
    """
    chosen = tuple(map(resolved, families)) or (*loss_families(), *catalogue.names())
    every = [i for i in load().values() if i.family in chosen]
    return [
        filled(
            *(ImplementationOut, i),
            library=i.library or None,
            version=i.version() if i.library else None,
            missing=i.missing() or None,
            contexts=sorted(i.contexts),
        )
        for i in sorted(every, key=lambda i: (chosen.index(i.family), i.role != "reference", i.id))
    ]


def settings(name: str) -> list[SettingOut]:
    """The settings of a loss family, or of a trainer's checks."""
    of = family(name).settings
    return [
        SettingOut(name=k, default=s.default, values=None if s.choices is None else list(s.choices), meaning=s.doc)
        for k, s in of.items()
    ]


def checks(name: str) -> list[CheckOut]:
    """The checks of a trainer.

    Raises:
        UsageError: for what is no trainer.
    """
    if not catalogue.is_trainer(name):
        raise UsageError(f"trainer {name!r} is unknown, {meant(name, catalogue.TRAINERS)}")
    counted = {p: [c.settings["check"] for c in catalogue.cases(name, p, 0)] for p in ("quick", "pr", "nightly")}
    return [
        CheckOut(
            name=one.name,
            run_as=list(one.paths),
            cases={p: names.count(one.name) for p, names in counted.items()},
            settings=list(one.settings),
            meaning=one.doc,
        )
        for one in catalogue.family(name).checks.values()
    ]


def profiles() -> list[ProfileOut]:
    """How many cases each profile draws of each loss family, and whether its seed is fixed."""
    from parity.case.profiles import PROFILES
    from parity.registry import loss_family

    return [
        ProfileOut(
            name=name,
            fixed_seed=profile.derandomised,
            cases={f: loss_family(f).drawn.get(name, 0) for f in loss_families()},
        )
        for name, profile in PROFILES.items()
    ]


def coverage(results: Any) -> list[CoveredOut]:
    """What a run judged and what it never did, from its results file."""
    from parity.tools.covered import of_file

    return of_file(results)


def show_coverage(found: Sequence[CoveredOut], console: Console) -> None:
    """A table, in red what was never judged without an excuse; then the counts in one line."""
    from parity.tools.covered import missing

    table = _table("coverage", ("of", "kind", "name", "judged", "declined", "why"))
    for one in found:
        values = (one.of, one.kind, one.name, f"{one.judged:,}", f"{one.declined:,}", one.why)
        table.add_row(*(Text(v) for v in values), style="red" if missing(one) else "dim" if not one.judged else "")
    console.print(table)
    never = sum(not one.judged for one in found)
    console.print(f"{len(found):,} judged or to be judged, {never:,} never", markup=False)


def show_implementations(found: Sequence[ImplementationOut], console: Console) -> None:
    """A table for all families: id, role, and the library's version or why it cannot run."""
    wide = max((len(i.id) for i in found), default=0)
    for number, (name, group) in enumerate(itertools.groupby(found, key=lambda i: i.family)):
        table = _table(f"{name}", ("", "", ""), show_header=False, lead=number > 0)
        for column, width in zip(table.columns, (wide + 2, 9, None), strict=True):
            column.no_wrap, column.min_width = width is not None, width
        for i in group:
            notes = [n for n, there in (("only if named", i.opt_in), ("Triton", i.interpreted)) if there]
            version = f"{i.library} {i.version or ''}".strip() if i.library else "parity"
            last = i.missing.partition(":")[0] if i.missing else ", ".join([version, *notes])
            table.add_row(
                Text(f"  {i.id}"), "reference" if i.role == "reference" else "", last, style="dim" if i.missing else ""
            )
        console.print(table)
    can = sum(i.missing is None for i in found)
    console.print(
        f"\n{can} of {len(found)} can run here. Settings: parity list --settings policy; checks of a trainer: "
        "parity list --checks dpo-trainer",
        markup=False,
    )


def show_rows(title: str, found: Sequence[Any], console: Console) -> None:
    """A table of structures; values and settings stand in the last column, behind the meaning."""
    rows = [_row(msgspec.structs.asdict(one)) for one in found]
    table = _table(title, tuple(rows[0]) if rows else ())
    for row in rows:
        table.add_row(*(Text(text) for text in row.values()))
    for column in table.columns[:-1]:
        column.max_width = 24
    console.print(table)


def _row(row: dict[str, Any]) -> dict[str, str]:
    more = {name.replace("_", " "): text for name in BEHIND if (text := _cell(row.pop(name, None)))}
    cells: dict[str, str] = {}
    for name, value in row.items():
        cells |= {str(k): f"{v:,}" for k, v in value.items()} if isinstance(value, Mapping) else {name: _cell(value)}
    if more:
        detail = "; ".join(f"{name}: {text}" for name, text in more.items())
        cells["meaning"] = f"{cells['meaning'].rstrip('.')}; {detail}"
    return cells


def _table(title: str, headings: Sequence[str], show_header: bool = True, lead: bool = False) -> Table:
    table = Table(box=None, pad_edge=False, show_header=show_header, padding=(0, 2, 0, 0))
    table.title, table.title_justify, table.title_style = Text(("\n" if lead else "") + title), "left", "bold"
    for heading in headings:
        table.add_column(heading.replace("_", " "), overflow="fold")
    return table


def _cell(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else "" if value is None else str(value)


BEHIND = ("run_as", "values", "settings")
"""Fields that stand behind the meaning: they are long."""
SECTIONS: dict[str, Callable[..., list[Any]]] = {
    "settings": settings,
    "checks": checks,
    "profiles": profiles,
    "coverage": coverage,
}
"""Option of `parity list` -> what it shows instead of the implementations."""
