"""Correct implementations with one small error, which must be caught.

Each is an `Implementation` with the recipe of the correct one that it edits, so that nothing but the edit can give it
away. `python -m parity.selftest.false_alarms --wrong` measures in what share of single cases each is caught.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from parity.case.inputs import Inputs
from parity.implementations.implementation import Implementation, Outputs
from parity.selftest.controls import control
from parity.selftest.mutants.steps import through


@dataclasses.dataclass(frozen=True)
class Wrong:
    """A wrong implementation, the dtypes in which it is tried, and the correct one that it edits."""

    implementation: Implementation
    base: Implementation
    dtypes: tuple[str, ...] = ("fp32", "fp16", "bf16")


def _edited(
    name: str, base: str, edit: Callable[[Inputs, Callable[[Inputs], Outputs]], Outputs], **fields: Any
) -> Wrong:
    honest = control(base)
    call = honest.call
    out = dataclasses.replace(honest, id=f"wrong.{name}", call=lambda x: edit(x, call))
    return Wrong(out, honest, **fields)


def _scaled_values(x: Inputs, call: Callable[[Inputs], Outputs]) -> Outputs:
    out = call(x)
    return out | {"logps": out["logps"] + 1e-3 * out["logps"].detach()}


def _scaled_gradients(x: Inputs, call: Callable[[Inputs], Outputs]) -> Outputs:
    names = [n for n in ("hidden", "weight", "bias") if n in x.leaves]
    return call(x.replace(**{n: through(x.tensors[n], lambda g: g * 1.01) for n in names}))


def _shifted_target(x: Inputs, call: Callable[[Inputs], Outputs]) -> Outputs:
    ids = x.ids.clone()
    mask = x.tensors.get("mask")
    places = (ids >= 0 if mask is None else mask.bool()).nonzero()
    if len(places):
        place = tuple(places[-1].tolist())
        ids[place] = (ids[place] + 1) % x.settings.V
    return call(x.replace(ids=ids))


def _dropped_token(x: Inputs, call: Callable[[Inputs], Outputs]) -> Outputs:
    out = call(x)
    keep = torch.ones_like(out["logps"])
    keep[-1, -1] = 0
    return out | {"logps": out["logps"] * keep}


def _dropped_row(x: Inputs, call: Callable[[Inputs], Outputs]) -> Outputs:
    mask = x.mask.clone()
    rows = mask.bool().any(1).nonzero()
    if len(rows):
        mask[int(rows[-1])] = 0
    return call(x.replace(mask=mask))


def _unignored(x: Inputs, call: Callable[[Inputs], Outputs]) -> Outputs:
    ids, places = x.ids.clone(), (x.ids < 0).nonzero()
    if len(places):
        ids[tuple(places[0].tolist())] = 0
    return call(x.replace(ids=ids))


def _leaked(x: Inputs, call: Callable[[Inputs], Outputs]) -> Outputs:
    mask, places = x.mask.clone(), (~x.mask.bool()).nonzero()
    if len(places):
        mask[tuple(places[0].tolist())] = 1
    return call(x.replace(mask=mask))


def _off_by_one(x: Inputs, call: Callable[[Inputs], Outputs]) -> Outputs:
    out, tokens = call(x), max(float(x.mask.sum()), 1.0)
    return out | {"loss": out["loss"] * (tokens / (tokens + 1))}


def _no_ratio(x: Inputs, call: Callable[[Inputs], Outputs]) -> Outputs:
    return call(x.replace(importance_sampling_ratio=None))


WRONG = {
    wrong.implementation.id.removeprefix("wrong."): wrong
    for wrong in (
        _edited("scale 1e-3 on log-probs", "honest.logprobs.reordered", _scaled_values, dtypes=("bf16",)),
        _edited("scale 1e-2 on gradients", "honest.logprobs.reordered", _scaled_gradients, dtypes=("bf16",)),
        _edited("scale 1e-2 on gradients, bf16 logits", "honest.logprobs.plain", _scaled_gradients, dtypes=("bf16",)),
        _edited("one shifted target", "honest.logprobs.plain", _shifted_target),
        _edited("a dropped token", "honest.logprobs.plain", _dropped_token),
        _edited("one ignored label scored", "honest.logprobs.plain", _unignored),
        _edited("loss: off-by-one normaliser", "honest.policy.plain", _off_by_one),
        _edited("loss: one leaked masked token", "honest.policy.plain", _leaked),
        _edited("loss: one shifted target", "honest.policy.plain", _shifted_target),
        _edited("loss: a dropped row", "honest.policy.plain", _dropped_row),
        _edited("loss: missing importance ratio", "honest.policy.plain", _no_ratio),
        _edited("loss: scale 1e-2 on gradients", "honest.policy.reordered", _scaled_gradients, dtypes=("bf16",)),
    )
}
"""Name -> wrong implementation."""
