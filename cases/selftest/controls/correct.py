"""Controls: correct implementations with other algorithms, which must never be called wrong.

The soak judges them on drawn cases, the limits of detection and the mutants are small edits of them.
They know no library and stay out of the registry of a run.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from cases.selftest.controls import preference
from cases.selftest.controls.divergence import ROADS
from cases.selftest.controls.logprobs import HEADS, NARROW, Head
from cases.selftest.controls.policy import METRICS, REORDERED, loss_of
from parity.case.inputs import Inputs
from parity.families.preference import PARTS
from parity.implementations.implementation import Implementation, Outputs
from parity.judge.recipe import Recipe

PAIRED = frozenset({"reordered", "online", "permuted"})
"""Heads that the policy losses pair with the other order of operations."""


def _logprobs(head: Head) -> Callable[[Inputs], Outputs]:
    def call(x: Inputs) -> Outputs:
        logps, entropy = head.call(x)
        return {"logps": logps} | ({"entropy": entropy} if x.settings.entropy != "none" else {})

    return call


def _loss_recipe(head: Head) -> Callable[[Inputs], Recipe]:
    """The head's recipe; its log-probs are stored in the head's dtype, the loss is float32."""

    def recipe(x: Inputs) -> Recipe:
        return dataclasses.replace(head.recipe(x), output="fp32")

    return recipe


def _of(family: str, name: str, **fields: Any) -> Implementation:
    return Implementation(id=f"control.{family}.{name}", family=family, role="candidate", **fields)


CONTROLS: dict[str, tuple[Implementation, ...]] = {
    "logprobs": tuple(
        _of(
            "logprobs",
            name,
            call=_logprobs(head),
            recipe=head.recipe,
            outputs=frozenset({"entropy"}),
            contexts=frozenset({"plain", "autocast", "checkpoint", "compile"}),
        )
        for name, head in HEADS.items()
    ),
    "policy": tuple(
        _of(
            "policy",
            name,
            call=loss_of(head.call, METRICS, **(REORDERED if name in PAIRED else {})),
            recipe=_loss_recipe(head),
            outputs=frozenset(METRICS),
            contexts=frozenset({"plain", "autocast", "checkpoint", "compile"}),
        )
        for name, head in HEADS.items()
        if name not in NARROW  # log-probs in bf16 cannot be told from an old policy's on the wrong side of a clip
    ),
    "divergence": tuple(
        _of("divergence", name, call=road, recipe=road.recipe, contexts=frozenset({"plain", "checkpoint", "compile"}))
        for name, road in ROADS.items()
    ),
    "preference": tuple(
        _of(
            "preference",
            name,
            call=preference.loss_of(head.call),
            recipe=_loss_recipe(head),
            outputs=frozenset(PARTS),
            contexts=frozenset({"plain", "autocast", "checkpoint", "compile"}),
        )
        for name, head in HEADS.items()
        if name not in NARROW  # a loss in float32 of log-probs that are not
    ),
}
"""Family -> its correct implementations."""


def control(id: str) -> Implementation:
    """The correct implementation called `id`, as "control.logprobs.online"."""
    return {i.id: i for of_family in CONTROLS.values() for i in of_family}[id]
