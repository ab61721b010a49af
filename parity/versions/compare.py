"""Compare two environments: the same frozen cases in both, and what changed."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from parity import data
from parity.case.case import Case
from parity.case.drawing import cases as case_strategy
from parity.case.drawing import draws
from parity.case.profiles import PROFILES, streams
from parity.errors import UsageError
from parity.registry import NAMES, loss_families, loss_family, meant, resolved, select
from parity.results.row import DECIDED, Row
from parity.running.plan import DTYPES
from parity.running.run import FIXED_SEED
from parity.trainers import catalogue
from parity.versions.case_check import CaseCheck
from parity.versions.client import EnvironmentUnusable
from parity.versions.environment import Environment
from parity.versions.history import folder
from parity.versions.look import Look, look
from parity.versions.resolve import PARTNERS
from parity.versions.row_diff import MARKS, Difference, differences, side, table
from parity.versions.spec import parse_all

Cases = list[tuple[str, Case]]
QUICK = ("trl", "liger-kernel")


def cases(wanted: Sequence[str], families: Sequence[str] = (), profile: str | None = None) -> Cases:
    """By name, what some wanted implementation can run, of `families` if any are named: every frozen case, each trainer's `twins`
    of profile pr, two small cases in each dtype of a user's own family, and what a run of `profile` draws.

    Raises:
        UsageError: for a family or profile that does not exist.
    """
    if profile and profile not in PROFILES:
        raise UsageError(f"profile {profile!r} is unknown, {meant(profile, PROFILES)}")
    kept = {one.family for one in select(wanted)} & (
        {*map(resolved, families)} or {*loss_families(), *catalogue.names()}
    )
    paths = {path.stem: path for path in [*sorted(folder().glob("*.json")), *data.frozen_cases()]}
    found = [(name, Case.load(path)) for name, path in paths.items()]
    found = [(name, case) for name, case in found if case.family in NAMES and case.tensors is None]
    for name in (n for n in (*loss_families(), *catalogue.names()) if n in kept):
        more = list(drawn(name, profile)) if profile else []
        if catalogue.is_trainer(name):
            more += [case for case in catalogue.cases(name, "pr", 0) if case.settings["check"] == "twins"]
        elif name not in NAMES:
            own = loss_family(name)
            more += [
                own.case(FIXED_SEED + n, d, own.drawing.example(n)) for d, n in itertools.product(DTYPES, range(2))
            ]
        found += [(case.id, case) for case in more]
    return [(name, case) for name, case in found if case.family in kept]


def drawn(family: str, profile: str) -> Iterator[Case]:
    """The cases that a run of the profile with its fixed seed draws of a family, or lists for a trainer."""
    if catalogue.is_trainer(family):
        yield from catalogue.cases(family, profile, FIXED_SEED)
        return
    found = loss_family(family)
    for index, count in enumerate(streams(found.drawing.counts[profile], "cpu")):
        yield from draws(case_strategy(found, DTYPES, profile), f"{FIXED_SEED}/{family}/{index}", count)


def implementations(named: Sequence[str], packages: Iterable[str] = ()) -> list[str]:
    """The named ones, else all of a run from TRL and Liger that need no interpreter, those of `packages`, and trainers.

    Of the trainers those as released and on their fused path: what `parity.fixes` repairs is no release's.
    """
    chosen = [i for i in select(named) if i.family in loss_families() or catalogue.is_trainer(i.family)]
    if not named:
        chosen = [i for i in chosen if not i.id.endswith("-trainer.fixed")]
        others = set(packages) - set(QUICK)
        chosen = [i for i in chosen if i.library in others or (i.library in QUICK and not i.interpreted)]
    return [i.id for i in chosen]


@dataclasses.dataclass(frozen=True)
class Compared:
    """Two environments: how many cases, the rows of each, what moved, and what else changed, a line each."""

    sides: tuple[Environment, Environment]
    cases: int
    rows: tuple[Sequence[Row], Sequence[Row]]
    moved: Sequence[Difference]
    notes: Sequence[str]

    @property
    def judged(self) -> tuple[int, ...]:
        """The quantities held against their definition in each."""
        return tuple(sum(r.verdict in DECIDED for r in rows) for rows in self.rows)

    @property
    def exit_code(self) -> int:
        """1 when something newly disagrees in the second, else 0."""
        return int(any(m.mark == "+" for m in self.moved))

    def text(self) -> str:
        counts = {mark: sum(m.mark == mark for m in self.moved) for mark in MARKS}
        before, after = self.sides
        packages = [
            f"{n} {a} -> {b}" for n in PARTNERS if (a := before.versions.get(n)) != (b := after.versions.get(n))
        ]
        lines = [f"before: {before.partners}", f"after:  {after.partners}", ""]
        lines += [table(self.moved), ""] if self.moved else []
        lines.append(
            f"{self.cases} cases, {self.judged[0]} and {self.judged[1]} judged quantities: "
            f"{counts['+']} worse (+), {counts['-']} better (-), {counts['~']} otherwise moved (~); ! outside its gate"
        )
        return "\n".join([*lines, f"packages: {', '.join(packages) or 'the same'}", *self.notes])

    def json(self) -> dict[str, Any]:
        """The same as `parity compare --json` prints it; `before` and `after` of what moved are rows of a results file."""
        before, after = (side.versions for side in self.sides)
        moved = [{f: getattr(m, f) for f in ("case", "mark", "nearer", "before", "after")} for m in self.moved]
        whole = {"before": before, "after": after, "cases": self.cases, "judged": self.judged, "moved": moved}
        return whole | {"notes": self.notes, "exit_code": self.exit_code}


def compare(
    specs: tuple[Sequence[str], Sequence[str]],
    named: Sequence[str] = (),
    *,
    families: Sequence[str] = (),
    profile: str | None = None,
    asked: Cases | None = None,
    device: str = "cpu",
    clock: float | None = None,
) -> Compared:
    """The cases `asked`, by default `cases`, in both environments, each in `clock` seconds.

    EnvironmentUnusable when one of the environments cannot be made, imported or run, or nothing was compared.
    """
    parsed = [parse_all(one) for one in specs]
    if parsed[0] == parsed[1]:
        raise UsageError(f"compare: both sides are {', '.join(map(str, parsed[0]))}; name two")
    wanted = implementations(named, (spec.name for one in parsed for spec in one))
    asked = cases(wanted, families, profile) if asked is None else asked
    before, after = (Environment.of(one) for one in specs)
    one, two = both((before, after), asked, wanted, device, clock=clock)
    moved = differences(side(one.rows, asked), side(two.rows, asked))
    notes = _settings_moved(one.config, two.config)
    found = Compared((before, after), len(asked), (one.rows, two.rows), moved, notes)
    if not all(found.judged):
        said = " and ".join(map(str, found.judged))
        raise EnvironmentUnusable(f"compare: {said} judged quantities, nothing to compare")
    return found


def both(
    made: Sequence[Environment], asked: Cases, wanted: Sequence[str], device: str, *, clock: float | None = None
) -> list[Look]:
    """What each environment shows of the cases, the environments at the same time, each in `clock` seconds."""
    given = [case for _, case in asked]
    shown = functools.partial(look, cases=given, implementations=wanted, config=True, clock=clock, device=device)
    with ThreadPoolExecutor(len(made)) as pool:
        return list(pool.map(shown, made))


def _settings_moved(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Fields of GRPOConfig that came, went or have another default."""
    changed = [f"{n} {before[n]!r} -> {after[n]!r}" for n in before if n in after and before[n] != after[n]]
    gone, new = [n for n in before if n not in after], [f"{n}={v!r}" for n, v in after.items() if n not in before]
    kinds = (("defaults changed", changed), ("settings gone", gone), ("settings new", new))
    return [f"GRPOConfig, {kind}: {', '.join(names)}" for kind, names in kinds if names]


def first_difference(
    package: str, older: str, newer: str, hold: Sequence[str], named: Sequence[str], find: str, device: str
) -> CaseCheck:
    """The frozen case, implementation and quantity that differ most clearly between two releases of a package.

    Raises:
        UsageError: when nothing differs in the direction asked for; it says what does in the other.
    """
    wanted = implementations(named, [package])
    asked = cases(wanted)
    made = [Environment.of([f"{package}=={version}"], hold) for version in (older, newer)]
    different = differences(*(side(one.rows, asked) for one in both(made, asked, wanted, device)))
    marks, said = "+-", ["broke", "became right"]
    if find != "broken":
        marks, said = marks[::-1], said[::-1]
    one = next((m for m in different if m.mark == marks[0]), None)
    if one is None:
        other = sum(m.mark == marks[1] for m in different)
        hint = f", but {other} quantities {said[1]} (change --find and swap the ends)" if other else ""
        where = f"between {package} {older} and {newer} in {len(asked)} frozen cases"
        raise UsageError(f"nothing {said[0]} {where}{hint}; name one with --case")
    case = dict(asked)[one.case]
    if one.quantity is not None:
        return CaseCheck(one.case, case, one.implementation, (one.quantity,), device=device)
    crashed = "crashed" in [r.verdict for r in (one.before, one.after) if r is not None]
    return CaseCheck(one.case, case, one.implementation, failure="crashed" if crashed else "disagree", device=device)
