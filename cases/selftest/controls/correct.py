"""Controls: correct implementations with other algorithms, which must never be called wrong.

The soak judges them on drawn cases, the limits of detection and the mutants are small edits of them.
They know no library and stay out of the registry of a run.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

from cases.selftest.controls import preference
from cases.selftest.controls.divergence import ROADS
from cases.selftest.controls.logprobs import HEADS, NARROW, Head, offered
from cases.selftest.controls.policy import METRICS, REORDERED, loss_of
from parity.case.inputs import Inputs
from parity.families.preference import PARTS
from parity.implementations.implementation import Adapter, Implementation
from parity.judge.recipe import Recipe

EVERY = frozenset({"plain", "autocast", "checkpoint", "compile"})
PAIRED = frozenset({"reordered", "online", "permuted"})
"""Heads that the policy losses pair with the other order of operations."""


def _loss_recipe(head: Head) -> Callable[[Inputs], Recipe]:
    """The head's recipe; its log-probs are stored in the head's dtype, the loss is float32."""

    def recipe(x: Inputs) -> Recipe:
        return dataclasses.replace(head.recipe(x), output="fp32")

    return recipe


def _of(family: str, name: str, **fields: Any) -> Implementation:
    return Implementation(id=f"control.{family}.{name}", family=family, role="candidate", **fields)


def _with_heads(
    family: str,
    call: Callable[[str, Head], Adapter],
    recipe: Callable[[Head], Any],
    outputs: Iterable[str],
    *left_out: str,
) -> tuple[Implementation, ...]:
    """One control for each head that is not left out."""
    heads = {name: head for name, head in HEADS.items() if name not in left_out}
    more = {"outputs": frozenset(outputs), "contexts": EVERY}
    return tuple(_of(family, name, call=call(name, h), recipe=recipe(h), **more) for name, h in heads.items())


def _policy(name: str, head: Head) -> Adapter:
    return loss_of(head.call, METRICS, **(REORDERED if name in PAIRED else {}))


CONTROLS: dict[str, tuple[Implementation, ...]] = {
    "logprobs": _with_heads("logprobs", lambda name, head: offered(head.call), lambda head: head.recipe, {"entropy"}),
    # log-probs in bf16 cannot be told from an old policy's on the wrong side of a clip
    "policy": _with_heads("policy", _policy, _loss_recipe, METRICS, *NARROW),
    "divergence": tuple(
        _of("divergence", name, call=road, recipe=road.recipe, contexts=EVERY - {"autocast"})
        for name, road in ROADS.items()
    ),
    # a loss in float32 of log-probs that are not
    "preference": _with_heads(
        "preference", lambda name, head: preference.loss_of(head.call), _loss_recipe, PARTS, *NARROW
    ),
}
"""Family -> its correct implementations."""


def control(id: str) -> Implementation:
    """The correct implementation called `id`, as "control.logprobs.online"."""
    return {i.id: i for of_family in CONTROLS.values() for i in of_family}[id]
