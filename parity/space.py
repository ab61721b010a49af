"""Hypothesis strategies that draw cases of a family."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from parity.case import Case
from parity.families import Family

CONTEXTS = {"quick": ("plain",) * 6 + ("checkpoint",), "pr": ("plain",) * 6 + ("checkpoint",)}
"""Call contexts of a draw; autocast joins them in float32, and torch.compile in the long profiles (it takes seconds)."""


@st.composite
def cases(draw: Any, family: Family, dtypes: Sequence[str], profile: str) -> Case:
    """A case of `family` in one of `dtypes`; the defaults of every dimension come first, so that it shrinks to them."""
    dtype = draw(st.sampled_from(tuple(dtypes)))
    contexts = CONTEXTS.get(profile, ("plain",) * 8 + ("checkpoint", "compile"))
    contexts = tuple(c for c in contexts if c in family.contexts)
    if dtype == "fp32":
        contexts += ("autocast",)
    settings = family.draw(draw, st, dtype, profile, contexts)
    return family.case(draw(st.integers(0, 1 << 20)), dtype, settings)
