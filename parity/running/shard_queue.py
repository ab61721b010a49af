"""Which shard a free worker gets next: what shows a mistake soonest, or where the time is limited, of the family that has had the
least of it."""

import collections
import itertools
import time
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from parity.running.plan import Shard

THRICE = 3  # losses of workers to one implementation after which it is left out
SECONDS = {"frozen": 0.6, "frozen logprobs": 2.2, "checks": 0.7, "drawn": 0.2, "besides": 6.0, "finding": 20.0}
"""CPU seconds of a case by kind, or by kind and family, as they were measured (profile pr, 25 November 2026)."""


def expected(shard: Shard) -> float:
    """CPU seconds that a shard may take."""
    return shard.count * SECONDS.get(f"{shard.kind} {shard.family}", SECONDS[shard.kind])


def by_yield(shards: Sequence[Shard]) -> list[Shard]:
    """Frozen cases, those that take least first, and between them the first drawn cases of every family: most mutants die in five
    to eight (docs/measured/mutants.md). Then the first checks of every trainer and what a user's function gets besides, drawn
    cases by their number, what implementations get besides, and the other checks, which are short: no worker is left with a long
    shard at the end.
    """
    first = [s for s in shards if s.kind == "drawn" and not s.start]
    frozen = sorted((s for s in shards if s.kind == "frozen"), key=lambda s: expected(s) / s.count)
    rest = [s for s in shards if s.kind != "frozen" and s not in first]
    late = {"drawn": 2, "besides": 3, "checks": 4, "finding": 5}

    def turn(s: Shard) -> tuple[int, int]:
        early = 1 if _fitted(s) else 0 if s.kind == "checks" and not s.start else None
        return (late[s.kind] if early is None else early), s.start

    rest.sort(key=turn)
    both = itertools.zip_longest(frozen, first)
    return [shard for pair in both for shard in pair if shard is not None] + rest


def _fitted(shard: Shard) -> bool:
    """Whether it is what a user's function gets besides, which is fitted to it."""
    return shard.kind == "besides" and shard.own


class ShardQueue:
    """Shards that nobody has yet. They are dealt `by_yield`. With a `deadline` frozen cases come first, for the ledger
    rests on them, then every family gets as much time as another, its shards keep their order but for what a user's function
    gets besides, which comes first, and after it only frozen cases are dealt. When all is done, `more` is asked once."""

    def __init__(
        self, shards: Sequence[Shard], deadline: float | None = None, more: Callable[[], Sequence[Shard]] = tuple
    ):
        self.out: dict[str, Shard] = {}
        self.deadline, self._more = deadline, more
        self._spent = collections.defaultdict[str, float](float)
        self._losses = collections.Counter[str]()
        if deadline is None:
            self.left = by_yield(shards)
        else:
            self.left = sorted(shards, key=lambda s: (s.kind != "frozen", not _fitted(s)))

    def take(self, has: Sequence[tuple[str, int]] = ()) -> Shard | None:
        """The next shard, or None: nothing is left, or not before others are done. `has`: (family, index) of the streams
        that the worker has drawn from: it goes on with one of them unless something takes twice as long."""
        late = self.deadline is not None and time.time() > self.deadline
        able = [s for s in self.left if not late or s.kind in ("frozen", "finding")]
        if not able and not self.out:
            able, self._more = list(self._more()), tuple
            self.left = able
        if not able:
            return None
        shard = able[0]
        if self.deadline is not None and shard.kind not in ("frozen", "finding"):
            shard = min(able, key=lambda s: self._spent[s.family])
        mine = next((s for s in able if s.kind == "drawn" and (s.family, s.index) in has), None)
        if mine and shard.kind == "drawn" and (self.deadline is None or mine.family == shard.family):
            shard = mine if 2 * expected(mine) > expected(shard) else shard
        self.left.remove(shard)
        self.out[shard.name] = shard
        self._spent[shard.family] += expected(shard)
        return shard

    def back(self, shard: Shard, seconds: float | None = None) -> None:
        """A shard is done, in so many CPU seconds, or will not be."""
        del self.out[shard.name]
        if seconds is not None:
            self._spent[shard.family] += seconds - expected(shard)

    def hold(self, implementation: str, times: int = 1) -> None:
        """One more loss of a worker to this implementation, or as many."""
        self._losses[implementation] += times

    def able(self, shard: Shard) -> Shard:
        """The shard without implementations that cost too many workers; a finding of one is looked at again all the same."""
        if shard.kind == "finding":
            return shard
        costly = {name for name, count in self._losses.items() if count >= THRICE}
        return replace(shard, exclude=tuple(sorted({*shard.exclude, *costly})))
