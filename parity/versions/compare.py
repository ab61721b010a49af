"""Compare two environments: the same frozen cases in both, and what changed."""

import dataclasses
import functools
import itertools
import shlex
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from parity import data
from parity.case.case import Case
from parity.errors import UsageError
from parity.registry import NAMES, loss_families, loss_family, resolved, select
from parity.results.report.wording import bisection
from parity.results.row import DECIDED, Row
from parity.running.plan import DTYPES
from parity.trainers import catalogue
from parity.trainers.specs import TRAINERS
from parity.versions.client import EnvironmentUnusable
from parity.versions.environment import Environment
from parity.versions.history import folder
from parity.versions.look import look
from parity.versions.releases import parse_all
from parity.versions.resolve import PARTNERS
from parity.versions.row_diff import MARKS, Difference, differences, side, table

Cases = list[tuple[str, Case]]
Configs = Mapping[str, Mapping[str, Any]]
QUICK = ("trl", "liger-kernel")


def cases(wanted: Sequence[str], families: Sequence[str] = ()) -> Cases:
    """By name, what some wanted implementation can run, of `families` if any are named: every frozen case, each trainer's
    `twins` of profile pr, and two small cases in each dtype of a user's own family."""
    kept = {one.family for one in select(wanted)} & ({*map(resolved, families)} or {*loss_families(), *TRAINERS})
    paths = {path.stem: path for path in [*sorted(folder().glob("*.json")), *data.frozen_cases()]}
    found = [(name, Case.load(path)) for name, path in paths.items()]
    found = [(name, case) for name, case in found if case.family in NAMES and case.tensors is None]
    for name in (n for n in (*loss_families(), *TRAINERS) if n in kept):
        more: list[Case] = []
        if catalogue.is_trainer(name):
            more = [case for case in catalogue.cases(name, "pr", 0) if case.settings["check"] == "twins"]
        elif name not in NAMES:
            own = loss_family(name)
            more = [own.example(n, d) for d, n in itertools.product(DTYPES, range(2))]
        found += [(case.id, case) for case in more]
    return [(name, case) for name, case in found if case.family in kept]


def implementations(named: Sequence[str], packages: Iterable[str] = ()) -> list[str]:
    """The named ones, else all of a run from TRL and Liger that need no interpreter, those of `packages`, and trainers.
    Of the trainers those as released and on their fused path: what `parity.fixes` repairs is no release's."""
    chosen = [i for i in select(named) if i.family in loss_families() or catalogue.is_trainer(i.family)]
    if not named:
        chosen = [i for i in chosen if not i.id.endswith("-trainer.fixed")]
        others = set(packages) - set(QUICK)
        chosen = [i for i in chosen if i.library in others or (i.library in QUICK and not i.interpreted)]
    return [i.id for i in chosen]


@dataclasses.dataclass(frozen=True)
class Compared:
    """Two environments: how many cases, the rows of each, what moved. `package`: whose releases they are, where its cases
    can be found by their names ("": they cannot). `configs`: the defaults of TRL's config classes in each."""

    package: str
    sides: tuple[Environment, Environment]
    cases: int
    rows: tuple[Sequence[Row], Sequence[Row]]
    moved: Sequence[Difference]
    configs: tuple[Configs, Configs] = ({}, {})

    @property
    def judged(self) -> tuple[int, ...]:
        """The quantities held against their definition in each."""
        return tuple(sum(r.verdict in DECIDED for r in rows) for rows in self.rows)

    @property
    def exit_code(self) -> int:
        """1 when something newly disagrees in the second, else 0."""
        return int(any(m.mark == "+" for m in self.moved))

    def text(self, each: bool = False) -> str:
        """What moved, with a line for each kind of change or for `each` case; the packages, settings, the search."""
        counts = {mark: sum(m.mark == mark for m in self.moved) for mark in MARKS}
        before, after = self.sides
        sides = [(name, before.versions.get(name), after.versions.get(name)) for name in PARTNERS]
        packages = [f"{name} {a} -> {b}" for name, a, b in sides if a != b]
        lines = [f"before: {before.partners}", f"after:  {after.partners}", ""]
        lines += [table(self.moved, each), ""] if self.moved else []
        moved = (
            f"{counts['+']} worse (+), {counts['-']} better (-), {counts['~']} otherwise moved (~); ! outside its gate"
        )
        lines.append(f"{self.cases} cases, {self.judged[0]} and {self.judged[1]} judged quantities: {moved}")
        lines += [f"packages: {', '.join(packages) or 'the same'}", *moved_defaults(*self.configs)]
        return "\n".join([*lines, *([f"which release: {self.search}"] if self.search else [])])

    @property
    def search(self) -> str:
        """The command that finds the release which made the clearest difference for the worse; nothing where none did."""
        first = next((m for m in self.moved if m.mark == "+"), None)
        good, bad = (side.versions.get(self.package) for side in self.sides)
        if first is None or not good or not bad or good == bad:
            return ""
        failure = str(first.after.verdict) if first.after else ""
        line = bisection(self.package, good, bad, first.case, first.implementation, failure)
        return f"{line} --quantity {shlex.quote(first.quantity)}" if first.quantity else line


def compare(
    specs: tuple[Sequence[str], Sequence[str]],
    named: Sequence[str] = (),
    *,
    families: Sequence[str] = (),
    asked: Cases | None = None,
    device: str = "cpu",
    clock: float | None = None,
) -> Compared:
    """The cases `asked`, by default `cases`, in both environments, in `clock` seconds with what it takes to make these.
    EnvironmentUnusable when one cannot be made, imported or run, or nothing was compared."""
    parsed = [parse_all(one) for one in specs]
    if parsed[0] == parsed[1]:
        raise UsageError(f"compare: both sides are {', '.join(map(str, parsed[0]))}; name two")
    wanted = implementations(named, (spec.package for one in parsed for spec in one))
    package = parsed[0][0].package if asked is None else ""
    asked = cases(wanted, families) if asked is None else asked
    begun = time.monotonic()
    before, after = (Environment.of(one) for one in specs)
    clock = None if clock is None else clock - (time.monotonic() - begun)
    if clock is not None and clock <= 0:
        raise EnvironmentUnusable("its time was over when the environments were made")
    given = [case for _, case in asked]
    shown = functools.partial(look, cases=given, implementations=wanted, configs=True, clock=clock, device=device)
    with ThreadPoolExecutor(2) as pool:  # the two environments are processes
        one, two = pool.map(shown, (before, after))
    moved = differences(side(one.rows, asked), side(two.rows, asked))
    found = Compared(package, (before, after), len(asked), (one.rows, two.rows), moved, (one.configs, two.configs))
    if not all(found.judged):
        said = " and ".join(map(str, found.judged))
        raise EnvironmentUnusable(f"compare: {said} judged quantities, nothing to compare")
    return found


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, str]:
    """The fields of a config class whose default changed, and how."""
    both = sorted(before.keys() & after.keys())
    return {name: f"{before[name]!r} -> {after[name]!r}" for name in both if before[name] != after[name]}


def moved_defaults(before: Configs, after: Configs) -> list[str]:
    """A line for each group of config classes and kind of change in their fields."""
    classes: dict[tuple[str, str], list[str]] = {}
    for name in before.keys() & after.keys():
        a, b = before[name], after[name]
        changed = [("defaults changed", f"{k} {change}") for k, change in changes(a, b).items()]
        gone = [("settings gone", k) for k in a.keys() - b.keys()]
        new = [("settings new", f"{k}={b[k]!r}") for k in b.keys() - a.keys()]
        for moved in (*changed, *gone, *new):
            classes.setdefault(moved, []).append(name)
    lines: dict[tuple[str, str], list[str]] = {}
    for (kind, text), names in sorted(classes.items()):
        lines.setdefault((", ".join(sorted(names)), kind), []).append(text)
    found = [f"{names}, {kind}: {', '.join(texts)}" for (names, kind), texts in sorted(lines.items())]
    others = {"gone": before.keys() - after.keys(), "new": after.keys() - before.keys()}
    return found + [f"config classes {kind}: {', '.join(sorted(names))}" for kind, names in others.items() if names]
