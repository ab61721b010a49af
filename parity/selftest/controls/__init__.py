"""Controls: correct implementations with other algorithms, which must never be called wrong.

They are the controls of everything that tests the harness itself: the soak (`python -m parity.selftest.false_alarms`),
the sensitivity tests, which make wrong implementations by small edits of these, and the mutants. They know no library
and stay out of the registry of a run.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from parity.case.inputs import Inputs
from parity.implementations.implementation import Implementation, Outputs
from parity.implementations.user import from_function
from parity.judge.recipe import Recipe
from parity.registry import loss_families, loss_family
from parity.selftest.controls.divergence import ROADS
from parity.selftest.controls.logprobs import HEADS, NARROW, Head
from parity.selftest.controls.policy import METRICS, REORDERED, loss_of

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
    return Implementation(id=f"honest.{family}.{name}", family=family, role="candidate", **fields)


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
}
"""Family of the package -> its correct implementations; of another family they stand in its record."""


def controls_of(family: str) -> tuple[Implementation, ...]:
    """The correct implementations of a family: those of `CONTROLS`, or of the record of a family of a user's own."""
    if family in CONTROLS:
        return CONTROLS[family]
    return tuple(recorded(family, name, found) for name, found in loss_family(family).controls.items())


def recorded(family: str, name: str, found: Any) -> Implementation:
    """A control or mutant of a family's record, called `honest.FAMILY.NAME`."""
    id = f"honest.{family}.{name}"
    if isinstance(found, Implementation):
        return dataclasses.replace(found, id=id)
    return from_function(found, id, [loss_family(family)])


def control(id: str) -> Implementation:
    """The honest implementation called `id`, as "honest.logprobs.online"."""
    return {i.id: i for name in loss_families() for i in controls_of(name)}[id]
