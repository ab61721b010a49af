"""What one call must leave to the next: an earlier call's results, a gradient that is there, the values that it is given."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

import torch
from torch.utils.checkpoint import checkpoint

from parity.judge.oracle import gradient_name

X = TypeVar("X")
Values = Mapping[str, torch.Tensor | None]


class Calls(Protocol[X]):
    """How a function is called, on tensors of the caller's own kind."""

    def fresh(self, other: bool = False) -> X:
        """New leaves without history, with the values, or with others of the same shapes."""

    def unseen(self) -> X:
        """Leaves with other values, in memory that no call has seen: what is kept by address would find the values there."""
        return self.fresh(other=True)

    def write(self, x: X, through_data: bool) -> None:
        """Write the values into tensors that hold others: in place, or through `.data`, which no version counter sees."""

    def inputs(self, x: X) -> Iterable[torch.Tensor]:
        """All tensors that the function is given."""

    def leaves(self, x: X) -> Mapping[str, torch.Tensor]:
        """The tensors that ask for a gradient."""

    def forward(self, x: X) -> Mapping[str, torch.Tensor]:
        """The outputs."""

    def on_leaves(self, x: X, leaves: Mapping[str, torch.Tensor]) -> X:
        """The same with other tensors for the leaves."""

    def upstream(self, x: X, outputs: Mapping[str, torch.Tensor]) -> Mapping[str, tuple[torch.Tensor, torch.Tensor]]:
        """Output and upstream gradient of those that have one."""

    def backward(self, x: X, outputs: Mapping[str, torch.Tensor], retain_graph: bool = False) -> Any:
        """Add the gradients to those of the leaves."""

    def gradients(self, x: X) -> Values:
        """`.grad` of the leaves by the quantity's name."""

    def within(self, x: X, derive: Callable[[], Any]) -> Any:
        """What `derive`, a backward pass of a forward on x, gives."""
        return derive()

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
    x = calls.unseen()
    outputs = calls.forward(x)
    theirs = dict(outputs) | asked(calls, x, outputs, calls.leaves(x))
    changed = _changed(theirs)
    calls.write(x, through_data)
    for leaf in calls.leaves(x).values():
        leaf.grad = None
    again = calls.forward(x)
    calls.backward(x, again)
    inside = {t.untyped_storage().data_ptr() for t in calls.inputs(x)}
    apart = {n for n, v in theirs.items() if v.untyped_storage().data_ptr() not in inside}
    how = THROUGH_DATA if through_data else THROUGH_DATA.partition(",")[0]
    return changed(apart) + _differing(calls, x, again, first, how)


def _changed(returned: Mapping[str, torch.Tensor]) -> Callable[[Iterable[str]], list[str]]:
    """What says later which of some values that a call returned were changed since."""
    kept = {n: v.detach().clone() for n, v in returned.items()}
    return lambda names: [
        f"{n} that an earlier call returned is changed by a later one"
        for n in returned
        if n in names and not same_bits(returned[n].detach(), kept[n])
    ]


def asked(
    calls: Calls[X], x: X, outputs: Mapping[str, torch.Tensor], leaves: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Gradients of some leaves as `torch.autograd.grad` gives them; a reentrant checkpoint gives none in this way."""
    pairs = calls.upstream(x, outputs)
    if not pairs or not leaves:
        return {}
    outs, above = zip(*pairs.values(), strict=True)
    try:
        given = calls.within(x, lambda: torch.autograd.grad(outs, [*leaves.values()], above, allow_unused=True))
    except RuntimeError as error:
        if "use_reentrant" not in str(error):
            raise
        return {}
    return {gradient_name(n): g for n, g in zip(leaves, given, strict=True) if g is not None}


def unrecorded(
    calls: Calls[X], first: Values, mode: Callable[[], AbstractContextManager[None]] = torch.no_grad
) -> list[str]:
    """Under no_grad or inference_mode the outputs are those of a training call, whatever calls on other values came before; and
    where no input asks for a gradient, as what a model gives there does not."""
    x, wrong = calls.fresh(other=True), list[str]()
    calls.forward(x)
    with mode():
        calls.forward(x)
        for asks in (True, False):
            calls.write(x, False)
            for leaf in calls.leaves(x).values():
                leaf.requires_grad_(asks)
            outputs = dict(calls.forward(x))
            wrong += calls.differ({n: v.detach() for n, v in outputs.items()}, {n: first.get(n) for n in outputs})
    return [f"under {mode.__name__} the outputs differ from those with gradients"] if wrong else []


def interleaved(calls: Calls[X], first: Values, others: int = 1) -> list[str]:
    """What is kept for the backward belongs to its call: forward A, `others` forwards B, backward A gives the gradients of A,
    and what A returned stays.

    A preference loss does so with its two halves, and so does every loss of two terms.
    """
    a = calls.fresh()
    outputs = calls.forward(a)
    changed = _changed(outputs)
    for _ in range(others):
        calls.forward(calls.fresh(other=True))
    found = changed(outputs)
    calls.backward(a, outputs)
    both = {n: g for n, g in calls.gradients(a).items() if g is not None and first.get(n) is not None}
    differ = calls.differ(both, {n: first[n] for n in both})
    return found + [f"{n} differs when another forward comes before its backward" for n in differ]


def through(calls: Calls[X], first: Values, way: Callable[..., Any], how: str = "differs") -> list[str]:
    """By way of a checkpoint or a compiler come the same values."""
    x, names = calls.fresh(), list[str]()

    def on_leaves(*leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out = calls.forward(calls.on_leaves(x, dict(zip(calls.leaves(x), leaves, strict=True))))
        names[:] = list(out)
        return tuple(out.values())

    outputs = dict(zip(names, way(on_leaves, *calls.leaves(x).values()), strict=True))
    calls.backward(x, outputs)
    return _differing(calls, x, outputs, first, how)


def recomputed(calls: Calls[X], first: Values) -> list[str]:
    """Under a checkpoint that is not reentrant come the same values; `torch.func` cannot be there, and says so."""
    try:
        how = "differs under a checkpoint that is not reentrant"
        return through(calls, first, lambda f, *leaves: checkpoint(f, *leaves, use_reentrant=False), how)
    except RuntimeError as error:
        if "saved tensor hooks" not in str(error):
            raise
        return []


def other_default(calls: Calls[X], first: Values) -> list[str]:
    """Under torch's default dtype float64 come the same values, in whatever dtype: what is given has dtypes of its own."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        x = calls.fresh()
        outputs = calls.forward(x)
        calls.backward(x, outputs)
        return _differing(calls, x, outputs, first, "differs where torch's default dtype is float64", any_dtype=True)
    finally:
        torch.set_default_dtype(before)


def _differing(
    calls: Calls[X], x: X, outputs: Mapping[str, torch.Tensor], first: Values, how: str, any_dtype: bool = False
) -> list[str]:
    """Which outputs and gradients are not the first's, in words."""
    values = {n: v.detach() for n, v in outputs.items()} | dict(calls.gradients(x))
    if any_dtype:
        values = {n: v if v is None or (f := first.get(n)) is None else v.to(f.dtype) for n, v in values.items()}
    return [f"{n} {how}" for n in calls.differ({n: values.get(n) for n in first}, first)]


LEAVES = 6
"""Inputs in which a NaN is tried."""


def shown(calls: Calls[X], first: Values, definition: Calls[X] | None = None) -> list[str]:
    """A NaN shows: where the entry of the first input with the largest gradient, or that of one with the least but 0, is NaN,
    some output is not finite, or the call fails; where the upstream gradients are NaN, as behind an overflow, so is some entry of
    each gradient. A NaN that the `definition` hides says nothing (`where(x > 0, x, 0)`).

    A kernel that goes through a vocabulary in blocks meets the target's NaN apart, and the others' where blocks are added.
    Infinities say nothing: log-softmax makes a NaN of an infinite logit, z - logsumexp(z) -inf, whose ratio is 0; both are
    correct.
    """
    if any(not bool(torch.isfinite(v).all()) for v in first.values() if v is not None):
        return []
    gradients = {n: first.get(gradient_name(n)) for n in calls.leaves(calls.fresh())}
    sizes = {n: g.abs() for n, g in gradients.items() if g is not None and bool(g.any())}
    places = [(n, size.argmax()) for n, size in sizes.items()][:1]
    places += [(n, torch.where(size > 0, size, torch.inf).argmin()) for n, size in sizes.items()][:LEAVES]
    for name, flat in places:
        place = torch.unravel_index(flat, sizes[name].shape)
        hidden = _hidden(calls, name, place)
        if hidden and not (definition and _hidden(definition, name, place)):
            return [f"a NaN in {name} is not seen in {', '.join(hidden)}"]
    lost = _lost(calls, [*sizes]) if sizes else []
    known = _lost(definition, lost) if definition and lost else []
    return [f"NaN upstream is not seen in the gradient of {n}" for n in lost if n not in known][:1]


def _lost(calls: Calls[X], names: Sequence[str]) -> list[str]:
    """The leaves whose gradient is finite although the whole upstream gradient is NaN."""
    x = calls.fresh()
    try:
        pairs = calls.upstream(x, calls.forward(x))
        outs, above = zip(*pairs.values(), strict=True)
        leaves = [calls.leaves(x)[name] for name in names]
        nan = [torch.full_like(g, torch.nan) for g in above]
        found = calls.within(x, lambda: torch.autograd.grad(outs, leaves, nan, allow_unused=True))
    except Exception:
        return []
    return [n for n, g in zip(names, found, strict=True) if g is not None and bool(torch.isfinite(g).all())]


def _hidden(calls: Calls[X], name: str, place: tuple[torch.Tensor, ...]) -> list[str]:
    """The outputs, where all are finite although this entry of an input is NaN."""
    x = calls.fresh(other=True)
    calls.write(x, False)
    with torch.no_grad():
        calls.leaves(x)[name].detach()[place] = torch.nan
    try:
        outputs = calls.forward(x)
    except Exception:
        return []
    return [*outputs] if all(bool(torch.isfinite(v).all()) for v in outputs.values()) else []


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
