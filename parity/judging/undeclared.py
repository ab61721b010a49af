"""Which narrower recipe would explain a disagreement: what the author of a function may have meant and did not declare."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator
from typing import Any

from parity.implementations.implementation import Implementation
from parity.judge.timings import within
from parity.judging.assess import CaseOracle, judge_all
from parity.protocol.exceptions import Outcome


@within("stage", "undeclared")
def undeclared(
    oracle: CaseOracle, implementation: Implementation, outcome: Outcome, failing: Collection[str]
) -> str | None:
    """A sentence with the fields of the first recipe under which every failing quantity agrees, or None.

    Only for a user's function on 16-bit inputs or under autocast, where plain torch rounds what nobody asked it to.
    """
    autocast = oracle.inputs.context == "autocast"
    dtype = "bf16" if autocast else oracle.inputs.case.dtype
    if not implementation.is_function or dtype == "fp32":
        return None
    recipe = implementation.recipe_for(oracle.inputs)
    for fields in _backward() if _is_wide(oracle, outcome, failing) else _forward():
        wider = dataclasses.replace(recipe, **fields).resolve(dtype)
        if wider == recipe:
            continue
        judged = judge_all(oracle, implementation, outcome, wider, only=failing)  # few replicas: a hint, no verdict
        if all(q in judged and judged[q].agrees for q in failing):
            named = ", ".join(f"{k}={v!r}" for k, v in fields.items())
            return f"right for code that rounds so: Recipe({named}); declare it if that is meant"
    return None


PARTS = 64
"""Partial gradients of which a sum in 16 bits is tried: a recipe has their number, and it is not known here."""


def _is_wide(oracle: CaseOracle, outcome: Outcome, failing: Collection[str]) -> bool:
    """Whether what is returned shows that all before it was computed in float32: it came so, and agrees."""
    names = [name for name in oracle.family.outputs if name in outcome.quantities]
    came = [outcome.quantities[name] for name in names]
    return not set(names) & set(failing) and all(v is not None and v.dtype.itemsize >= 4 for v in came)


def _backward() -> Iterator[dict[str, Any]]:
    """Fields of recipes, step by step, of what a backward pass keeps in 16 bits."""
    yield {"dlogits": "input"}
    yield {"accumulate": "input", "partials": PARTS}
    yield {"dlogits": "input", "accumulate": "input", "partials": PARTS}


def _forward() -> Iterator[dict[str, Any]]:
    """The same of what plain torch keeps in 16 bits, forward and backward."""
    logits = {"logits": "input", "dlogits": "input"}
    softmax = logits | {"softmax": "input"}
    yield logits
    yield logits | {"accumulate": "input", "partials": PARTS}
    yield softmax
    yield softmax | {"log_sum_exp": "input"}
    yield softmax | {"elementwise": "input"}
    yield softmax | {"elementwise": "input", "log_sum_exp": "input"}
