"""Values of a check, by hash: others for each seed of a case, the same in the processes that it starts."""

import contextlib
import functools
import os
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar
from unittest import mock

from torch import Tensor

from parity.case.case import hashes
from parity.judge import values

SEED = "PARITY_CASE_SEED"
"""Environment variable with the seed of the case that is run."""
T = TypeVar("T")


def seed() -> int:
    """The seed of the case that is run; 0 outside of one."""
    return int(os.environ.get(SEED, "0"))


@contextlib.contextmanager
def of_case(number: int) -> Iterator[None]:
    """Within it values are those of this seed."""
    with mock.patch.dict(os.environ, {SEED: str(number)}):
        yield


def _named(name: str) -> str:
    return f"{name}/{seed()}" if seed() else name


def _of_the_case(make: Callable[[int, str, Sequence[int]], Tensor]) -> Callable[[int, str, Sequence[int]], Tensor]:
    return lambda number, name, shape: make(number, _named(name), shape)


normal, uniform = _of_the_case(values.normal), _of_the_case(values.uniform)
"""Those of `parity.judge.values`, of the case."""


def words(number: int, name: str, length: int) -> list[int]:
    """`length` numbers below 50."""
    return [int(h % 50) for h in hashes(number, _named(name), (length,))]


def share(number: int, name: str) -> float:
    """In [0, 1); no arithmetic of torch's, which replicas round."""
    return float(hashes(number, _named(name), (1,))[0] >> 40) / 2**24


def order(count: int) -> list[int]:
    """The numbers below `count`; under another seed than 0 in an order of its own."""
    return random.Random(seed()).sample(range(count), count) if seed() else [*range(count)]


def once(make: Callable[..., T]) -> Callable[..., T]:
    """`make`, whose results are kept for each seed."""
    kept = functools.cache(lambda _, *args: make(*args))

    @functools.wraps(make)
    def get(*args: Any) -> T:
        return kept(seed(), *args)

    get.cache_clear = kept.cache_clear  # type: ignore[attr-defined]
    return get
