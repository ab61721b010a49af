"""Hypothesis strategies that draw cases of a family."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.internal.conjecture.providers import CONSTANTS_CACHE, HypothesisProvider
from hypothesis.internal.constants_ast import Constants

from parity.case.case import Case
from parity.case.family import Family

SHORT, LONG = ("plain",) * 6 + ("checkpoint",), ("plain",) * 8 + ("checkpoint", "compile")
"""Call contexts of a draw; autocast joins them in float32 (half of it to float16), torch.compile in the long profiles (it takes
seconds)."""

FEW = 16
"""One case in so many has a setting that few functions take."""


@st.composite
def cases(draw: Any, family: Family, dtypes: Sequence[str], profile: str) -> Case:
    """A case of `family` in one of `dtypes`."""
    dtype = draw(st.sampled_from(tuple(dtypes)))
    contexts: tuple[str, ...] = SHORT if profile in ("quick", "pr") else LONG
    if dtype == "fp32":
        contexts += ("autocast",)
    drawn = family.draw(draw, st, dtype, profile, contexts) if family.draw else each_by_itself(draw, family)
    number = draw(st.integers(0, 1 << 20))
    if drawn.get("context") == "autocast" and number % 2:
        drawn["context"] = "autocast_fp16"
    return family.case(number, dtype, with_few(family, number, dtype, drawn))


def with_few(family: Family, number: int, dtype: str, drawn: dict[str, Any]) -> dict[str, Any]:
    """Settings of a case; one in FEW has another value of one that few functions take. By the seed of the case, so that no
    other case changes."""
    names = [name for name, setting in family.settings.items() if setting.few]
    found = zlib.crc32(f"few/{number}".encode())
    rest = found >> 8  # the lowest bits decide the share
    if not names or found % FEW:
        return drawn
    name = names[rest % len(names)]
    values = family.settings[name].few
    return family.canonical(dtype, drawn | {name: values[rest // len(names) % len(values)]})


def each_by_itself(draw: Any, family: Family) -> dict[str, Any]:
    """Every setting from the values that it says are drawn, or its choices."""
    values = {n: s.drawn or s.choices for n, s in family.settings.items()}
    return {name: draw(st.sampled_from(found)) for name, found in values.items() if found}


BATCH = 10
"""Draws in a batch: behind its tenth example Hypothesis mutates what it has, and draws stop being independent."""


def batch(strategy: st.SearchStrategy[Any], key: str) -> list[Any]:
    """The simplest case and up to nine independent ones: the same key draws the same."""
    found: list[Any] = []

    @seed(zlib.crc32(key.encode()))
    @settings(
        max_examples=BATCH,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    @given(strategy)
    def stream(case: Any) -> None:
        found.append(case)

    # else Hypothesis draws one number in twenty from constants of the local modules that are loaded, and has no switch for it
    with mock.patch.object(HypothesisProvider, "_local_constants", Constants()):
        CONSTANTS_CACHE.cache.clear()
        try:
            stream()
        finally:
            CONSTANTS_CACHE.cache.clear()
    return found


def draws(strategy: st.SearchStrategy[Case], key: str, count: int) -> Iterator[Case]:
    """`count` different cases, drawn in independent batches."""
    seen: set[str] = set()
    number = 0
    while len(seen) < count and number < 10 * count:
        for case in batch(strategy, f"{key}/{number}"):
            if case.id not in seen and len(seen) < count:
                seen.add(case.id)
                yield case
        number += 1
