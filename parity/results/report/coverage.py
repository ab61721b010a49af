"""What a run exercised: the share of every dimension, pairs that never met, reasons for what did not run."""

import collections
import dataclasses
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from parity.results.report.findings import normalised
from parity.results.report.outcomes import ImplementationCase
from parity.results.row import DECLINED


@dataclasses.dataclass(frozen=True)
class Dimension:
    """One setting of a family.

    Attributes:
        name: of the setting.
        default: its default; None also where the header does not name it.
        drawn: implementation-cases away from the default, whatever the verdict.
        exercised: those of them that were compared.
        share: `exercised` as a fraction of the family's compared implementation-cases.
        values: distinct values that were compared, the default included.
    """

    name: str
    default: Any
    drawn: int
    exercised: int
    share: float
    values: int


@dataclasses.dataclass(frozen=True)
class Coverage:
    """Dimensions of one family over implementation-cases that were compared.

    Attributes:
        family: its name.
        compared: implementation-cases.
        dimensions: every dimension, the least exercised first.
        pairs: pairs of dimensions that were each exercised.
        never: those of them that were never away from their defaults together in a compared implementation-case.
        apart: pairs that count as neither, because an implementation does not run with them, each with the reason. A setting
            that it refuses alone runs where it says nothing, such as a softcap where every token is ignored.
    """

    family: str
    compared: int
    dimensions: tuple[Dimension, ...]
    pairs: int
    never: tuple[tuple[str, str], ...]
    apart: tuple[tuple[str, str, str], ...] = ()

    @property
    def unexercised(self) -> tuple[Dimension, ...]:
        """The dimensions that no comparison had away from its default."""
        return tuple(d for d in self.dimensions if d.exercised == 0)


@dataclasses.dataclass(frozen=True)
class Reason:
    """Why implementation-cases were unsupported or refused; `share` is of those with the same verdict."""

    verdict: str
    message: str
    count: int
    share: float
    implementations: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Openings:
    """What a user's function would have to take: `steps` of (parameter, cases that it opens beside those before it)."""

    implementation: str
    cases: int
    unsupported: int
    steps: tuple[tuple[str, int], ...]


ABSENT = re.compile(r" has no parameter (.+)$")
"""How `parity.implementations.user` says which parameters a case needs."""


def openings(cases: Iterable[ImplementationCase]) -> list[Openings]:
    """For each function with cases that need other parameters: greedily the one that opens most of them, and so on.

    Where none opens a case by itself, the one that most of the closed cases need comes next.
    """
    needed: dict[str, list[frozenset[str]]] = collections.defaultdict(list)
    for case in cases:
        found = ABSENT.search(case.rows[0].message) if case.outcome == "unsupported" else None
        needed[case.implementation].append(frozenset(found[1].split(", ") if found else ()))
    out = []
    for name, needs in needed.items():
        closed, steps = [n for n in needs if n], list[tuple[str, int]]()
        unsupported = len(closed)
        while closed:
            wanted = collections.Counter(p for n in closed for p in n)
            opened = collections.Counter(p for n in closed if len(n) == 1 for p in n)
            best = max(sorted(wanted), key=lambda p: (opened[p], wanted[p]))
            steps.append((best, opened[best]))
            closed = [n - {best} for n in closed if n != {best}]
        if unsupported:
            out.append(Openings(name, len(needs), unsupported, tuple(steps)))
    return out


def coverage(
    family: str,
    cases: Sequence[ImplementationCase],
    defaults: Mapping[str, Any],
    apart: Sequence[tuple[str, str, str]] = (),
) -> Coverage:
    """Coverage of one family; `defaults` names all its dimensions, `apart` the pairs that no case can have; "": any other."""
    names = sorted(set(defaults) | {k for c in cases for k in c.rows[0].settings})
    bit = {name: 1 << k for k, name in enumerate(names)}
    drawn: collections.Counter[str] = collections.Counter()
    exercised: collections.Counter[str] = collections.Counter()
    values: dict[str, set[str]] = {name: set() for name in names}
    together = dict.fromkeys(names, 0)
    compared = 0
    for case in cases:
        settings = case.rows[0].settings
        away = [k for k, v in settings.items() if k not in defaults or not _same(v, defaults[k])]
        drawn.update(away)
        if case.outcome != "compared":
            continue
        compared += 1
        exercised.update(away)
        mask = sum(bit[k] for k in away)
        for k in away:
            together[k] |= mask
        for k in settings:
            values[k].add(json.dumps(settings[k], sort_keys=True))
    met = [n for n in names if exercised[n]]
    never = [(a, b) for i, a in enumerate(met) for b in met[i + 1 :] if not together[a] & bit[b]]
    for name in names:
        if name in defaults and exercised[name] < compared:  # rows leave out what is at its default
            values[name].add(json.dumps(defaults[name], sort_keys=True))
    dimensions = [
        Dimension(n, defaults.get(n), drawn[n], exercised[n], exercised[n] / max(compared, 1), len(values[n]))
        for n in names
    ]
    dimensions.sort(key=lambda d: (d.exercised, d.name))
    why = {frozenset(one[:2]) - {""}: one[2] for one in apart}
    found = [
        (pair, why.get(frozenset(pair)) or why.get(frozenset(pair[:1])) or why.get(frozenset(pair[1:])))
        for pair in never
    ]
    without = tuple((*pair, reason) for pair, reason in found if reason)
    never = [pair for pair, reason in found if not reason]
    pairs = len(met) * (len(met) - 1) // 2 - len(without)
    return Coverage(family, compared, tuple(dimensions), pairs, tuple(never), without)


def shared(takers: Iterable[Coverage]) -> list[tuple[str, str, str]]:
    """The pairs that are apart for each implementation that was compared with both of their settings away from the default."""
    found, own = dict[tuple[str, str], str](), list(takers)
    for one in own:
        found |= {(a, b): why for a, b, why in one.apart}
    for one in own:
        apart, met = {(a, b) for a, b, _ in one.apart}, {d.name for d in one.dimensions if d.exercised}
        found = {pair: why for pair, why in found.items() if pair in apart or not met.issuperset(pair)}
    return [(*pair, why) for pair, why in found.items()]


def reasons(cases: Iterable[ImplementationCase]) -> list[Reason]:
    """Why nothing was compared, the most frequent first; messages that differ in a number only are one reason."""
    totals: collections.Counter[str] = collections.Counter()
    groups: dict[tuple[str, str], list[ImplementationCase]] = collections.defaultdict(list)
    first: dict[tuple[str, str], str] = {}
    for case in cases:
        if case.outcome not in DECLINED:
            continue
        message = next((r.message for r in case.rows if r.verdict == case.outcome), "")
        message = ABSENT.sub(" has no parameter for what the case moves", message)
        key = case.outcome, normalised(message)
        totals[case.outcome] += 1
        groups[key].append(case)
        first.setdefault(key, message or "no reason given")
    out = [
        Reason(
            verdict=key[0],
            message=first[key],
            count=len(found),
            share=len(found) / totals[key[0]],
            implementations=tuple(sorted({c.implementation for c in found})),
        )
        for key, found in groups.items()
    ]
    return sorted(out, key=lambda r: (r.verdict != "unsupported", -r.count, r.message))


def _same(a: Any, b: Any) -> bool:
    """Equality that tells True from 1: a flag that was turned on is away from a default of 1."""
    return a == b and isinstance(a, bool) == isinstance(b, bool)
