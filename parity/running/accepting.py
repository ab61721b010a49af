"""Drawn cases moved to where an implementation does not refuse them.

A kernel with few parameters refuses nearly every case that moves many settings. What it takes is learned from itself: each
setting is tried alone, on a small case, and a drawn case that it refuses goes back to the default (or to the first of
the family's bases that the implementation runs on) in the settings that it refuses alone. What it takes alone it may still
refuse together: then the fewest that help go back too. What it refuses alone it may take beside what else the case has.
"""

import dataclasses
import functools
import itertools
import json
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any

from parity.case.case import Case
from parity.compare.one_case import skip_reason
from parity.errors import UsageError
from parity.implementations.implementation import Implementation
from parity.protocol.call import execute
from parity.registry import loss_family, oracle_of
from parity.results.row import Row

SIZES = ("B", "T", "V", "H")
LENGTHS = [3, 1]
"""Of the two rows of three tokens that a family's defaults have."""
REFUSED = ("unsupported", "refused")


def refused(rows: Iterable[Row]) -> set[str]:
    """Implementations of which no row was judged because they, or their adapters, do not take the case."""
    rows = list(rows)
    return {r.implementation for r in rows} - {r.implementation for r in rows if r.verdict not in REFUSED}


MOVED, MOVED_LARGE = 8, 2
"""One in so many of the drawn cases that an implementation refuses is moved to where it does not, besides those that show it
a pair of settings; of the large ones, which are few in every run, more; of a costly implementation, which gets few, each."""
LARGE_ROWS, LARGE_ROW = 128, 4000
"""Rows of the largest tensor of a case, or their length, beyond which it is large."""
COSTLY = 4
"""An implementation that gets fewer than one in so many cases gets none beside them for the sake of pairs."""


@dataclasses.dataclass(frozen=True)
class Draws:
    """The draws of which a case is one: the first of its family, whether the implementation gets one of them by its share, and
    what a profile multiplies its cost by."""

    cases: Callable[[], Sequence[Case]]
    gets: Callable[[Case], bool]
    cost: int


class Accepting:
    """What one implementation takes. It is asked once a setting and kind of value, whatever the cases are."""

    announce: Callable[[Case], bool]
    """Called before the implementation runs; says whether it may."""
    verdict, why = "", ""
    """Of the last call: "ran" or what became of it instead, and why."""

    def __init__(self, implementation: Implementation, device: str):
        self.implementation, self.device = implementation, device
        self.family = loss_family(implementation.family)
        self.dtype = "fp32"
        self.alone: dict[tuple[str, Any], bool] = {}
        self.new: Set[str] | None = None

    def deals(self, case: Case, draws: Draws) -> bool:
        """Whether a run moves a case if it is refused: one in so many (`MOVED`), by the case's id, and each that brings settings
        together which no draw before it that the implementation gets did; not in a short profile, where nearly every one does.

        The same wherever a file lies and whoever runs the other draws.
        """
        name = self.implementation.id.rpartition("/")[2]
        rows, length = self.family.sizes(self.family.full_settings(case))
        large = rows > LARGE_ROWS or length > LARGE_ROW
        share = 1 if self.implementation.every > 1 else MOVED_LARGE if large else MOVED
        if zlib.crc32(f"moved/{name}/{case.id}".encode()) % share == 0:
            return True
        return draws.cost == 1 and self.base is not None and case.id in self._pairs(draws)

    def wants(self, case: Case, draws: Draws) -> bool:
        """Whether it gets a case that is not among its share: one that brings settings together which none of these does."""
        costly = 1 < self.implementation.every <= COSTLY and draws.cost == 1
        return costly and self.base is not None and case.id in self._pairs(draws) and not draws.gets(case)

    def _pairs(self, draws: Draws) -> Set[str]:
        """The draws that bring settings together which none before them does, those first that are in its share.

        What it refuses only together counts as taken: to know it, every case would have to run.
        """
        if self.new is None:
            share = [case for case in draws.cases() if draws.gets(case)]
            others = [case for case in draws.cases() if self.implementation.every > 1 and not draws.gets(case)]
            beside: dict[str, set[str]] = {}
            self.new = found = set[str]()
            for case in share + others:
                kept = self.kept_beside(case)
                if any(kept - beside.get(name, set()) for name in kept):
                    found.add(case.id)
                    for name in kept:
                        beside.setdefault(name, set()).update(kept)
        return self.new

    def without_refused(self, case: Case) -> Case | None:
        """The case with every setting that is refused alone, and those that are refused together, back at their base; None
        where that is the same case, or none.

        In float32 (or float16), or with the default sizes, where a dtype or a size is what it does not claim.
        """
        if case.tensors is not None or self.base is None:
            return None
        names = self.kept(case)
        kept = {k: v for k, v in case.settings.items() if k in names}
        settings = {**kept, **{k: v for k, v in self.base.items() if k not in kept}}
        small = {k: v for k, v in settings.items() if k not in SIZES and not isinstance(v, list)}
        for chosen, dtype in itertools.product((settings, small), (case.dtype, self.dtype)):
            moved = self._settled(Case(case.family, case.seed, dtype, chosen))
            if self.skipped(moved) is None:
                found = self._together(moved) if self.stands(moved) else None
                found = found and self._with_more(found, moved, case)
                return found if found != case else None
        return None

    def _settled(self, case: Case) -> Case:
        """The case without what says nothing beside its other settings, or in its dtype."""
        default = {name: setting.default for name, setting in self.family.settings.items()}
        full = default | dict(case.settings)
        other = {n: v for n, v in self.family.settled(case.dtype, dict(full)).items() if v != full[n]}
        kept = {n: v for n, v in case.settings.items() if n not in other}
        return dataclasses.replace(case, settings=kept | {n: v for n, v in other.items() if v != default[n]})

    def _with_more(self, found: Case, moved: Case, case: Case) -> Case:
        """`found`, or `moved` with each setting of the case that it lost and that the implementation takes there."""
        for name in sorted(case.settings.keys() - moved.settings.keys()):
            more = dataclasses.replace(moved, settings={**moved.settings, name: case.settings[name]})
            if more != case and self.accepts(more):
                found = moved = more
        return found

    def _together(self, case: Case) -> Case | None:
        """The case itself where the implementation runs on it, else with one setting back at its base, or no more than need be.

        One that has many values stays before one that has few, and both before a number: so many draws fewer move it to
        the value that it has here.
        """
        if self.accepts(case):
            return case
        base = self.base or {}
        moved = [name for name, value in case.settings.items() if name not in SIZES and value != base.get(name)]
        order = sorted(moved, key=lambda name: (len(self.family.settings[name].choices or ()), name))

        def back(names: Iterable[str]) -> Case:
            kept = {k: v for k, v in case.settings.items() if k not in names}
            return dataclasses.replace(case, settings={**base, **kept})

        for name in order:
            if self.accepts(near := back([name])):
                return near
        away = next((n for n in range(2, len(order) + 1) if self.accepts(back(order[:n]))), None)
        if away is None:
            return None
        gone = order[:away]
        for name in gone[-2::-1]:  # the last one went because it had to
            gone = less if self.accepts(back(less := [n for n in gone if n != name])) else gone
        return back(gone)

    @functools.cached_property
    def base(self) -> Mapping[str, Any] | None:
        """The first of the family's bases on which the implementation runs, in float32 or else in float16."""
        bases = [{}, *self.family.bases, *(base for probe in self.family.probes for base in probe.bases)]
        once = {tuple(sorted(base.items())): base for base in bases}
        for self.dtype, base in itertools.product(("fp32", "fp16"), once.values()):
            if self._runs(base):
                return base
        return None

    def takes(self, name: str, value: Any) -> bool:
        """Whether it takes a setting's value, or one of its kind, where all others are at the base."""
        like = kind(value)
        if (name, str(like)) not in self.alone:
            self.alone[name, str(like)] = self._runs({**(self.base or {}), name: like}, name)
        return self.alone[name, str(like)]

    def kept_beside(self, case: Case) -> set[str]:
        """The settings of a case that it takes alone, or beside the choices of the case."""
        return self.kept(case) | {name for name in case.settings if self.takes_beside(name, case)}

    def takes_beside(self, name: str, case: Case) -> bool:
        """Whether it takes a setting that it may refuse alone beside the choices of the case that a probe of it has."""
        base = self.base or {}
        for probe in self.family.probes:
            if probe.setting == name and probe.among:
                chosen = {k: v for k, v in probe.among.items() if isinstance(v, str)}
                key = name, json.dumps(probe.among, sort_keys=True, default=str)
                if all(case.settings.get(k) == v for k, v in chosen.items()):
                    if key not in self.alone:
                        self.alone[key] = self._runs({**base, **probe.among, name: probe.value}, name)
                    if self.alone[key]:
                        return True
        return False

    def kept(self, case: Case) -> set[str]:
        """The settings of a case that it takes alone; sizes are not asked about."""
        return {name for name, value in case.settings.items() if name in SIZES or self.takes(name, value)}

    def _runs(self, settings: Mapping[str, Any], name: str = "") -> bool:
        """Whether it runs with these settings; in a dtype in which the named one means something, if there is one."""
        full = {one: setting.default for one, setting in self.family.settings.items()} | dict(settings)
        every = (self.dtype, *(dtype for dtype in ("fp32", "fp16", "bf16") if dtype in self.implementation.dtypes))
        means = (d for d in every if name and self.family.settled(d, dict(full))[name] == settings[name])
        return self.accepts(Case(self.family.name, 0, next(means, self.dtype), settings))

    def accepts(self, case: Case) -> bool:
        """Whether it runs on a case; it is called once."""
        self.verdict, self.why = "unsupported", self.skipped(case) or ""
        if self.why or not self.stands(case) or not self.announce(case):
            return False
        inputs = oracle_of(case, self.device).offered(self.implementation).inputs
        outcome = execute(self.implementation, inputs)
        self.verdict, self.why = outcome.verdict, outcome.message or ""
        return outcome.verdict not in REFUSED

    def runs(self, case: Case) -> bool:
        """Whether it comes to its end on a case; what crashes is accepted and does not."""
        return self.accepts(case) and self.verdict == "ran"

    def skipped(self, case: Case) -> str | None:
        """Why it does not claim a case, before it is called."""
        return skip_reason(self.family, self.implementation, case, self.family.full_settings(case), self.device)

    def stands(self, case: Case) -> bool:
        """Whether it is a case at all: some values stand only beside others."""
        try:
            self.family.build(case)
        except UsageError:
            return False
        return True


def kind(value: Any) -> Any:
    """One value for all that an implementation takes or refuses together: numbers between 0 and 1, above, below; lists."""
    if isinstance(value, list):
        return LENGTHS
    if isinstance(value, float) and value not in (0.0, 1.0):
        return 0.5 if 0 < value < 1 else 2.5 if value > 1 else -1.0
    return value
