"""What one call must leave to the next: an earlier call's results, a gradient that is there, the values that it is given."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

import torch

from parity.judge.oracle import gradient_name

X = TypeVar("X")
Values = Mapping[str, torch.Tensor | None]


class Calls(Protocol[X]):
    """How a function is called, on tensors of the caller's own kind."""

    def fresh(self, other: bool = False) -> X:
        """New leaves without history, with the values, or with others of the same shapes."""

    def write(self, x: X, through_data: bool) -> None:
        """Write the values into tensors that hold others: in place, or through `.data`, which no version counter sees."""

    def inputs(self, x: X) -> Iterable[torch.Tensor]:
        """All tensors that the function is given."""

    def leaves(self, x: X) -> Mapping[str, torch.Tensor]:
        """The tensors that ask for a gradient."""

    def forward(self, x: X) -> Mapping[str, torch.Tensor]:
        """The outputs."""

    def upstream(self, x: X, outputs: Mapping[str, torch.Tensor]) -> Mapping[str, tuple[torch.Tensor, torch.Tensor]]:
        """Output and upstream gradient of those that have one."""

    def backward(self, x: X, outputs: Mapping[str, torch.Tensor], retain_graph: bool = False) -> Any:
        """Add the gradients to those of the leaves."""

    def gradients(self, x: X) -> Values:
        """`.grad` of the leaves by the quantity's name."""

    def differ(self, values: Values, expected: Values) -> list[str]:
        """Names of values that are not the expected ones, as far as another order of their sums allows."""


def same_bits(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    """Whether two tensors are equal in dtype, shape and every entry, a NaN equal to a NaN; or neither is there."""
    if a is None or b is None:
        return a is b
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a, b) or bool(((a == b) | (a.isnan() & b.isnan())).all())


def repeated(calls: Calls[X], first: Values) -> list[str]:
    """State that leaks from call to call: other values, then the first's in the same tensors, written over in between.

    So an optimizer updates a parameter, and a CUDA graph's caller its inputs: nothing may be kept by shape, by address or by
    version, and what the earlier call returned stays as it was.
    """
    found = _repeated(calls, first, True)
    if found and found[-1].endswith(THROUGH_DATA):
        found = _repeated(calls, first, False) or found
    return found


THROUGH_DATA = "differs when called again after other values in the same tensors, which .data exchanged"


def _repeated(calls: Calls[X], first: Values, through_data: bool) -> list[str]:
    x = calls.fresh(other=True)
    outputs = calls.forward(x)
    theirs = dict(outputs) | asked(calls, x, outputs, calls.leaves(x))
    kept = {n: v.detach().clone() for n, v in theirs.items()}
    calls.write(x, through_data)
    for leaf in calls.leaves(x).values():
        leaf.grad = None
    again = calls.forward(x)
    calls.backward(x, again)
    inside = {t.untyped_storage().data_ptr() for t in calls.inputs(x)}
    found = [
        f"{n} that an earlier call returned is changed by a later one"
        for n, v in theirs.items()
        if v.untyped_storage().data_ptr() not in inside and not same_bits(v.detach(), kept[n])
    ]
    values = {n: v.detach() for n, v in again.items()} | dict(calls.gradients(x))
    how = THROUGH_DATA if through_data else THROUGH_DATA.partition(",")[0]
    return found + [f"{n} {how}" for n in calls.differ({n: values.get(n) for n in first}, first)]


def asked(
    calls: Calls[X], x: X, outputs: Mapping[str, torch.Tensor], leaves: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Gradients of some leaves as `torch.autograd.grad` gives them; a reentrant checkpoint gives none in this way."""
    pairs = calls.upstream(x, outputs)
    if not pairs or not leaves:
        return {}
    outs, above = zip(*pairs.values(), strict=True)
    try:
        given = torch.autograd.grad(outs, list(leaves.values()), above, allow_unused=True)
    except RuntimeError as error:
        if "use_reentrant" not in str(error):
            raise
        return {}
    return {gradient_name(n): g for n, g in zip(leaves, given, strict=True) if g is not None}


def unrecorded(
    calls: Calls[X], first: Values, mode: Callable[[], AbstractContextManager[None]] = torch.no_grad
) -> list[str]:
    """Under no_grad or inference_mode the outputs are those of a training call."""
    x = calls.fresh()
    with mode():
        outputs = dict(calls.forward(x))
    wrong = calls.differ({n: v.detach() for n, v in outputs.items()}, {n: first.get(n) for n in outputs})
    return [f"under {mode.__name__} the outputs differ from those with gradients"] if wrong else []


def interleaved(calls: Calls[X], first: Values) -> list[str]:
    """What is kept for the backward belongs to its call: forward A, forward B, backward A gives the gradients of A.

    A preference loss does so with its two halves, and so does every loss of two terms.
    """
    a = calls.fresh()
    outputs = calls.forward(a)
    calls.forward(calls.fresh(other=True))
    calls.backward(a, outputs)
    both = {n: g for n, g in calls.gradients(a).items() if g is not None and first.get(n) is not None}
    differ = calls.differ(both, {n: first[n] for n in both})
    return [f"{n} differs when another forward comes before its backward" for n in differ]


def accumulation(calls: Calls[X]) -> list[str]:
    """Backward into an existing .grad adds, and a second backward with retain_graph adds the same again."""
    x = calls.fresh()
    outputs = calls.forward(x)
    try:
        calls.backward(x, outputs, retain_graph=True)
    except RuntimeError as error:
        if "donated buffers" not in str(error):
            raise
        x = calls.fresh()  # torch.compile frees what a backward pass has read, and says so: a graph for each
        calls.backward(x, calls.forward(x))
        outputs = calls.forward(x)
    first = {n: g.clone() for n, g in calls.gradients(x).items() if g is not None}
    calls.backward(x, outputs)
    finite = [n for n, g in first.items() if bool(torch.isfinite(g + g).all())]
    halves = {n: g / 2 for n, g in calls.gradients(x).items() if n in finite and g is not None}
    differ = calls.differ(halves, {n: first[n] for n in halves})
    return [f"a second backward into .grad of {n.removeprefix('grad_')} does not add the same gradient" for n in differ]
