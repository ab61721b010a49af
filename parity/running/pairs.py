"""Cases for the pairs of settings that an implementation takes and that none of its draws brings together.

A pair are two settings away from their defaults in one case. Draws that an implementation gets, as they are or moved, are tried
until every pair that they show is known to run. The others are put together greedily, as few cases as that takes, each with
few settings away from the default: a covering array of strength 2 over what the implementation takes.
"""

import itertools
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Set
from typing import Any

from parity.case.case import Case
from parity.running.accepting import SIZES, Accepting, Draws, kind

AWAY = 4
"""Settings at most that join those of a case's first pair."""
FRUITLESS = 4
"""Settings in a row that do not run beside the others, after which no more join."""
TRIED = 40
"""Cases of a pair that are tried before it counts as refused, at most."""

NO_PAIR, ALONE = "one says nothing beside the other", "refused alone"

Pair = tuple[str, str]


class Pairs:
    """What one implementation meets and what it does not; `takes` asks it, `draws` are those of its family.

    Attributes:
        moves: setting that it takes -> (value, what goes with it), those of the family's probes first, then drawn values, the
            most frequent of their kind, and the most frequent kind first.
        apart: pairs that the implementation does not run with however they were tried, or that are none by the family's
            definition (`Family.settled`), each with the reason; beside "" stands a setting that it refuses alone.
    """

    def __init__(self, takes: Accepting, draws: Draws):
        self.takes, self.draws, self.family = takes, draws, takes.family
        drawn = draws.cases()
        self.dtypes = list(dict.fromkeys([takes.dtype, *sorted({case.dtype for case in drawn}, reverse=True)]))
        values: dict[str, dict[str, Counter[str]]] = defaultdict(lambda: defaultdict(Counter))
        for case in drawn:
            for name in self.takes.kept_beside(case):
                value = case.settings[name]
                values[name][repr(value if name in SIZES else kind(value))][json.dumps(value)] += 1
        self.moves: dict[str, list[tuple[Any, Mapping[str, Any]]]] = {}
        for name in sorted(values):
            probed = [(one.value, one.among) for one in self.family.probes if one.setting == name and not one.data]
            kinds = sorted(values[name].values(), key=Counter.total, reverse=True)
            usual = [json.loads(counted.most_common(1)[0][0]) for counted in kinds]
            self.moves[name] = probed + [(value, self._companions(name, value, drawn)) for value in usual]
        names = {name for case in drawn for name in case.settings}
        self.apart = [(name, "", ALONE) for name in sorted(names - self.moves.keys())]
        self._bits = {pair: 1 << k for k, pair in enumerate(itertools.combinations(self.moves, 2))}

    def _companions(self, name: str, value: Any, drawn: Iterable[Case]) -> Mapping[str, Any]:
        """What goes with a value that says nothing alone: as little as that takes of the draw that moves least beside it."""
        if self._settled({name: value}, {name}, self.dtypes):
            return {}
        case = min((one for one in drawn if one.settings.get(name) == value), key=lambda one: len(one.settings))
        kept = dict(case.settings)
        for other in case.settings:
            less = {one: was for one, was in kept.items() if one != other}
            if other != name and self._settled(less, {name}, [case.dtype]):
                kept = less
        return {one: was for one, was in kept.items() if one != name}

    def missing(self) -> list[Pair]:
        """The pairs of what it takes that none of the draws that it gets shows.

        Draws that promise much for their size are tried first.
        """
        gets = [case for case in self.draws.cases() if self.draws.gets(case) or self.takes.wants(case, self.draws)]
        promised = {n: self._mask(self.takes.kept_beside(case)) for n, case in enumerate(gets)}
        size = [1 + self._size(case) // 256 for case in gets]
        open_ = (1 << len(self._bits)) - 1
        while promised:
            best = max(promised, key=lambda n: (promised[n] & open_).bit_count() / size[n])
            if not promised.pop(best) & open_:
                break
            open_ &= ~self._shown(gets[best])
        return [pair for pair, bit in self._bits.items() if open_ & bit]

    def cases(self) -> Iterator[Case]:
        """A case that runs for every pair that is missing, or for several of them. The others are `apart` in the end."""
        left = dict.fromkeys(self.missing())
        while left:
            pair = next(iter(left))
            del left[pair]
            tried = list(itertools.islice(self._tries(pair), TRIED))
            case = next(filter(self.takes.runs, tried), None)
            if case is not None:
                case = self._with_more(case, left)
                for met in [one for one in left if {*one} <= case.settings.keys()]:
                    del left[met]
                yield case
            else:
                self.apart.append((*pair, self.takes.why if tried else NO_PAIR))

    def _with_more(self, case: Case, left: Iterable[Pair]) -> Case:
        """The case with the settings that it has most of the missing pairs with, one after the other."""
        refused: set[str] = set()
        room = len(case.settings) + AWAY
        while len(case.settings) < room and len(refused) < FRUITLESS:
            gains = Counter(name for a, b in left for name, other in ((a, b), (b, a)) if other in case.settings)
            names = [name for name in gains if name not in case.settings and name not in refused]
            if not names:
                break
            name = max(names, key=lambda one: gains[one])
            tries = (
                more
                for value, among in self.moves[name][:3]
                for more in self._settled({**among, **case.settings, name: value}, {*case.settings, name}, [case.dtype])
            )
            more = next(filter(self.takes.runs, tries), None)
            refused |= {name} if more is None else set()
            case = more or case
        return case

    def _tries(self, pair: Pair) -> Iterator[Case]:
        """Cases that have both away from the default: first by the first moves of either."""
        a, b = pair
        base = self.takes.base or {}
        moves = itertools.product(enumerate(self.moves[a]), enumerate(self.moves[b]))
        for (_, (x, with_a)), (_, (y, with_b)) in sorted(moves, key=lambda two: two[0][0] + two[1][0]):
            yield from self._settled({**base, **with_a, **with_b, a: x, b: y}, {a, b}, self.dtypes)

    def _settled(self, settings: Mapping[str, Any], names: Set[str], dtypes: Iterable[str]) -> list[Case]:
        """The case as the family's definition has it, in the first dtype in which all the named settings stay away from their
        defaults and which the implementation claims; where it claims none of these, in the first of them. Or no case."""
        full = {name: setting.default for name, setting in self.family.settings.items()} | dict(settings)
        if full.get("lengths") is not None:
            full["lengths"] = [max(0, full["T"] - 2 * row) for row in range(full["B"])]
        found = [self.family.case(0, dtype, self.family.settled(dtype, dict(full))) for dtype in dtypes]
        found = [case for case in found if names <= case.settings.keys() and self.takes.stands(case)]
        return [case for case in found if not self.takes.skipped(case)][:1] or found[:1]

    def _shown(self, case: Case) -> int:
        """The pairs that a run compares with this draw, as it is or moved."""
        if self.takes.kept_beside(case) >= case.settings.keys() and self.takes.accepts(case):
            return self._mask(case.settings) if self.takes.verdict == "ran" else 0
        moved = self.takes.without_refused(case) if self.takes.deals(case, self.draws) else None
        return 0 if moved is None else self._mask(moved.settings)

    def _mask(self, names: Iterable[str]) -> int:
        return sum(self._bits[pair] for pair in itertools.combinations(sorted(self.moves.keys() & set(names)), 2))

    def _size(self, case: Case) -> int:
        rows, length = self.family.sizes(self.family.full_settings(case))
        return rows * length
