"""Drawn cases moved to where an implementation does not refuse them.

A kernel with few parameters refuses nearly every case that moves many settings. What it takes is learned from itself: each
setting is tried alone, on a small case, and a drawn case that it refuses goes back to the default (or to the first of
the family's bases that the implementation runs on) in the settings that it refuses alone.
"""

import functools
import itertools
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from parity.case.case import Case
from parity.errors import UsageError
from parity.implementations.implementation import Implementation
from parity.judging.compare import skip_reason
from parity.judging.execute import execute
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


MOVED = 4
"""One in so many of the drawn cases that an implementation refuses is moved to where it does not; of a costly one each."""


def dealt(implementation: Implementation, case: Case) -> bool:
    """Whether a run moves this case for an implementation that refuses it: by the case's id, the same wherever a file lies."""
    share, name = MOVED if implementation.every == 1 else 1, implementation.id.rpartition("/")[2]
    return zlib.crc32(f"moved/{name}/{case.id}".encode()) % share == 0


class Accepting:
    """What one implementation takes. It is asked once a setting and kind of value, whatever the cases are."""

    announce: Callable[[Case], bool]
    """Called before the implementation runs; says whether it may."""

    def __init__(self, implementation: Implementation, device: str):
        self.implementation, self.device = implementation, device
        self.family = loss_family(implementation.family)
        self.dtype = "fp32"
        self.alone: dict[tuple[str, Any], bool] = {}

    def moved(self, case: Case) -> Case | None:
        """The case with every setting that is refused alone back at its base; None where that is the same case, or none.

        In float32 (or float16), or with the default sizes, where a dtype or a size is what it does not claim.
        """
        if case.tensors is not None or self.base is None:
            return None
        kept = {k: v for k, v in case.settings.items() if k in SIZES or self.takes(k, v)}
        settings = {**kept, **{k: v for k, v in self.base.items() if k not in kept}}
        small = {k: v for k, v in settings.items() if k not in SIZES and not isinstance(v, list)}
        for chosen, dtype in itertools.product((settings, small), (case.dtype, self.dtype)):
            moved = Case(case.family, case.seed, dtype, chosen)
            if self._skipped(moved) is None:
                return moved if self._stands(moved) and moved != case else None
        return None

    @functools.cached_property
    def base(self) -> Mapping[str, Any] | None:
        """The first of the family's bases on which the implementation runs, in float32 or else in float16."""
        bases = [{}, *(base for probe in self.family.probes for base in probe.bases)]
        once = {tuple(sorted(base.items())): base for base in bases}
        for self.dtype, base in itertools.product(("fp32", "fp16"), once.values()):
            if self._runs(base):
                return base
        return None

    def takes(self, name: str, value: Any) -> bool:
        """Whether it takes a setting's value, or one of its kind, where all others are at the base."""
        kind = _kind(value)
        if (name, str(kind)) not in self.alone:
            self.alone[name, str(kind)] = self._runs({**(self.base or {}), name: kind})
        return self.alone[name, str(kind)]

    def _runs(self, settings: Mapping[str, Any]) -> bool:
        case = Case(self.family.name, 0, self.dtype, settings)
        if self._skipped(case) or not self._stands(case) or not self.announce(case):
            return False
        inputs = oracle_of(case, self.device).offered(self.implementation).inputs
        return execute(self.implementation, inputs).verdict not in REFUSED

    def _skipped(self, case: Case) -> str | None:
        return skip_reason(self.family, self.implementation, case, self.family.full_settings(case), self.device)

    def _stands(self, case: Case) -> bool:
        """Whether it is a case at all: some values stand only beside others."""
        try:
            self.family.build(case)
        except UsageError:
            return False
        return True


def _kind(value: Any) -> Any:
    """One value for all that an implementation takes or refuses together: numbers between 0 and 1, above, below; lists."""
    if isinstance(value, list):
        return LENGTHS
    if isinstance(value, float) and value not in (0.0, 1.0):
        return 0.5 if 0 < value < 1 else 2.5 if value > 1 else -1.0
    return value
