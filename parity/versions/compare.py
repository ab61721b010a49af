"""Compare two environments: the same frozen cases in both, and what changed."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from parity import data
from parity.case.case import Case
from parity.case.profiles import PROFILES
from parity.errors import UsageError
from parity.families.policy_settings import CONFIG_FIELDS, LOSS_TYPES
from parity.registry import NAMES, loss_families, loss_family, meant, resolved
from parity.results.row import DECIDED
from parity.running.plan import DTYPES
from parity.trainers.specs import TRAINERS
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
SEED = 20261120


def cases() -> Cases:
    """The frozen cases of the families compared, by name: regressions, and those of the history records."""
    paths = {path.stem: path for path in [*sorted(folder().glob("*.json")), *data.frozen_cases()]}
    found = [(name, Case.load(path)) for name, path in paths.items()]
    return [(name, case) for name, case in found if case.family in NAMES and case.tensors is None]


def of_own(wanted: Sequence[str]) -> Cases:
    """Two small cases in each dtype for the families of `wanted` that have no frozen ones: a user's own."""
    from parity.registry import select

    families = dict.fromkeys(one.family for one in select(wanted) if one.family in set(loss_families()) - set(NAMES))
    every = itertools.product(map(loss_family, families), DTYPES, range(2))
    found = [family.case(SEED + number, dtype, family.drawing.example(number)) for family, dtype, number in every]
    return [(case.id, case) for case in found]


def twins() -> Cases:
    """Every trainer once, all of a window in one sequence a time, by the id of the case: what profile pr runs of them."""
    from parity.trainers import catalogue

    found = [case for name in catalogue.names() for case in catalogue.cases(name, "pr", 0)]
    return [(case.id, case) for case in found if case.settings["check"] == "twins"]


def drawn(families: Sequence[str], profile: str | None) -> Cases:
    """What a run of the profile with its fixed seed draws of the families, by the id of the case."""
    from parity.versions.recall import of_profile

    if profile and profile not in PROFILES:
        raise UsageError(f"profile {profile!r} is unknown, {meant(profile, PROFILES)}")
    every = [case for name in families if profile for stream in of_profile(name, profile) for case in stream]
    return [(case.id, case) for case in every]


def of(frozen: Cases, wanted: Sequence[str]) -> Cases:
    """The cases that some wanted implementation can run."""
    from parity.registry import select

    families = {one.family for one in select(wanted)}
    return [(name, case) for name, case in frozen if case.family in families]


def implementations(named: Sequence[str], packages: Iterable[str] = ()) -> list[str]:
    """The named ones, else all of a run from TRL and Liger that need no interpreter, those of `packages`, and trainers.

    Of the trainers those as released and on their fused path: what `parity.fixes` repairs is no release's.
    """
    from parity.registry import select
    from parity.trainers.catalogue import is_trainer

    chosen = [i for i in select(named) if i.family in loss_families() or is_trainer(i.family)]
    if not named:
        chosen = [i for i in chosen if not i.id.endswith("-trainer.fixed")]
        others = set(packages) - set(QUICK)
        chosen = [i for i in chosen if i.library in others or (i.library in QUICK and not i.interpreted)]
    return [i.id for i in chosen]


@dataclasses.dataclass(frozen=True)
class Compared:
    """Two environments: how many cases, the quantities judged in each, what moved, and what else changed, a line each."""

    sides: tuple[Environment, Environment]
    cases: int
    judged: tuple[int, int]
    moved: Sequence[Difference]
    notes: Sequence[str]

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
    all_defaults: bool = False,
    device: str = "cpu",
    clock: float | None = None,
) -> Compared:
    """The frozen cases (of `families`), and those that `profile` draws, in both environments, each in `clock` seconds.

    all_defaults: every setting of the loss at the release's own default, which is what a user gets who sets nothing;
    what moves then is the release, wrong or not.
    EnvironmentUnusable when one of the environments cannot be made, imported or run, or nothing was compared.
    """
    parsed = [parse_all(one) for one in specs]
    if parsed[0] == parsed[1]:
        raise UsageError(f"compare: both sides are {', '.join(map(str, parsed[0]))}; name two")
    sides = [Environment.of(one) for one in specs]
    wanted = implementations(named, (spec.name for one in parsed for spec in one))
    kept = tuple(resolved(name) for name in families) or (*loss_families(), *TRAINERS)
    frozen = of([*cases(), *of_own(wanted), *twins(), *drawn(kept, profile)], wanted)
    frozen = [(name, case) for name, case in frozen if case.family in kept]
    asked = [frozen, frozen]
    if all_defaults:
        asked = [_with_defaults(frozen, one.config) for one in both(sides, [[], []], (), device)]
    seen = both(sides, asked, wanted, device, clock=clock)
    found = [one.rows for one in seen]
    judged = [sum(r.verdict in DECIDED for r in rows) for rows in found]
    if not all(judged):
        raise EnvironmentUnusable(f"compare: {' and '.join(map(str, judged))} judged quantities, nothing to compare")
    different = differences(side(found[0], asked[0]), side(found[1], asked[1]), settings_too=all_defaults)
    settings = _settings_moved(*(one.config for one in seen))
    whole = len(asked[0]), (judged[0], judged[1]), different
    return Compared((sides[0], sides[1]), *whole, settings)


def both(
    made: Sequence[Environment],
    asked: Sequence[Cases],
    wanted: Sequence[str],
    device: str,
    *,
    clock: float | None = None,
) -> list[Look]:
    """What each environment shows of its cases, the environments at the same time, each in `clock` seconds."""

    def one(environment: Environment, frozen: Cases) -> Look:
        given = [case for _, case in frozen]
        return look(environment, given, wanted, config=True, clock=clock, device=device)

    with ThreadPoolExecutor(len(made)) as pool:
        return list(pool.map(one, made, asked))


def _with_defaults(frozen: Cases, config: Mapping[str, Any]) -> Cases:
    """The cases whose settings a GRPOConfig decides, with each of those at the release's default, each such case once."""
    values = {n: v for n, v in config.items() if n in CONFIG_FIELDS}
    if values.get("loss_type", LOSS_TYPES[0]) not in LOSS_TYPES:
        raise UsageError(f"--all-defaults: loss_type {values['loss_type']!r} is none of {', '.join(LOSS_TYPES)}")
    out: dict[str, tuple[str, Case]] = {}
    for name, case in frozen:
        if case.family == "policy":
            kept = {n: v for n, v in case.settings.items() if n not in (*CONFIG_FIELDS, "entropy_quantile")}
            made = loss_family(case.family).case(case.seed, case.dtype, kept | values)
            out.setdefault(made.id, (name, made))
    return list(out.values())


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
    frozen = of([*cases(), *of_own(wanted), *twins()], wanted)
    made = [Environment.of([f"{package}=={version}"], hold) for version in (older, newer)]
    found = both(made, [frozen, frozen], wanted, device)
    different = differences(*(side(one.rows, frozen) for one in found))
    mark, other = "+-" if find == "broken" else "-+"
    if one := next((m for m in different if m.mark == mark), None):
        return replace(_check(one, dict(frozen)[one.case]), device=device)
    raise UsageError(
        f"nothing {'broke' if find == 'broken' else 'became right'} between {package} {older} and {newer} in "
        f"{len(frozen)} frozen cases{_other_way(different, other, find)}; name one with --case or --check"
    )


def _check(one: Difference, case: Case) -> CaseCheck:
    if one.quantity is not None:
        return CaseCheck(one.case, case, one.implementation, (one.quantity,))
    verdicts = [r.verdict for r in (one.before, one.after) if r is not None]
    return CaseCheck(one.case, case, one.implementation, failure="crashed" if "crashed" in verdicts else "disagree")


def _other_way(different: Sequence[Difference], mark: str, find: str) -> str:
    count = sum(m.mark == mark for m in different)
    if not count:
        return ""
    return (
        f", but {count} quantities {'became right' if find == 'broken' else 'broke'} (change --find and swap the ends)"
    )
