"""Which shard a free worker gets next: the longest, or where the time is limited, of the family that has had the least of it."""

import collections
import time
from collections.abc import Callable, Mapping, Sequence

from parity.results.header import Part
from parity.running.plan import Shard

SECONDS = {"frozen": 1.5, "checks": 4.0, "drawn": 0.15, "pairs": 10.0, "finding": 20.0}
SECONDS |= {"drawn policy": 0.4, "drawn divergence": 0.2}
"""CPU seconds of a case by kind, or by kind and family, where no earlier run has told."""


def expected(shard: Shard, before: Mapping[str, Part]) -> float:
    """CPU seconds that a shard will take: as it took in the run before, or as cases of its kind and family took there."""
    if (same := before.get(shard.name)) and same.cases == shard.count:
        return same.seconds
    start = f"{shard.family} {shard.kind} "
    alike = [part for name, part in before.items() if name.startswith(start) and part.cases]
    if alike:
        return shard.count * sum(p.seconds for p in alike) / sum(p.cases for p in alike)
    return shard.count * SECONDS.get(f"{shard.kind} {shard.family}", SECONDS[shard.kind])


class Deck:
    """Shards that nobody has yet.

    Frozen cases come first: the ledger rests on them. With `shares` (family -> weight, 1 where none is named), time goes to
    the families in these proportions, and the shards of a family keep their order. After `deadline` only frozen cases are
    dealt. When all is done, `more` is asked once.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        before: Mapping[str, Part] | None = None,
        shares: Mapping[str, float] | None = None,
        deadline: float | None = None,
        more: Callable[[], Sequence[Shard]] = tuple,
    ):
        self.out: dict[str, Shard] = {}
        self.shares, self.deadline, self._more = shares, deadline, more
        self._spent: dict[str, float] = collections.defaultdict(float)
        self._expected = {s.name: expected(s, before or {}) for s in shards}
        limited = shares is not None
        self.left = sorted(shards, key=lambda s: (s.kind != "frozen", 0 if limited else -self._expected[s.name]))

    def take(self, has: Sequence[tuple[str, int]] = ()) -> Shard | None:
        """The next shard, or None: nothing is left, or not before others are done.

        `has`: (family, index) of the streams that the worker has drawn from. It goes on with one of them unless there is
        something twice as long to do.
        """
        late = self.deadline is not None and time.time() > self.deadline
        able = [s for s in self.left if not late or s.kind in ("frozen", "finding")]
        if not able and not self.out:
            able, self._more = list(self._more()), tuple
            self.left = able
        if not able:
            return None
        shard = able[0]
        if self.shares is not None and shard.kind not in ("frozen", "finding"):
            weight = self.shares
            shard = min(
                able, key=lambda s: (self._spent[s.family] / weight.get(s.family, 1.0), -weight.get(s.family, 1.0))
            )
        mine = next((s for s in able if s.kind == "drawn" and (s.family, s.index) in has), None)
        if mine and shard.kind == "drawn" and (self.shares is None or mine.family == shard.family):
            shard = mine if 2 * self._long(mine) > self._long(shard) else shard
        self.left.remove(shard)
        self.out[shard.name] = shard
        self._spent[shard.family] += self._long(shard)
        return shard

    def back(self, shard: Shard, seconds: float | None = None) -> None:
        """A shard is done, in so many CPU seconds, or will not be."""
        del self.out[shard.name]
        if seconds is not None:
            self._spent[shard.family] += seconds - self._long(shard)

    def _long(self, shard: Shard) -> float:
        return self._expected.get(shard.name, 0.0)
