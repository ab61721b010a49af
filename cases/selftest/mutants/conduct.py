"""Mutants with right results and wrong side effects: changed inputs, environment, random state, patched functions."""

import functools
import os
import random
from collections.abc import Callable
from typing import Any

import torch

from cases.selftest.mutants.steps import through
from parity.case.inputs import Inputs
from parity.implementations.implementation import Adapter, Outputs

Wrong = Callable[[Adapter], Adapter]


def _before(act: Callable[[Inputs], object]) -> Wrong:
    return lambda call: lambda x: (act(x), call(x))[1]


def _after(act: Callable[[Inputs], object]) -> Wrong:
    return lambda call: lambda x: (call(x), act(x))[0]


def _rebind(x: Inputs) -> None:
    plain = torch.nn.functional.log_softmax
    torch.nn.functional.log_softmax = lambda *args, **kwargs: plain(*args, **kwargs)


def _first(x: Inputs) -> str:
    """The hidden states, or whatever a family's first tensor is."""
    return next(n for n, t in x.tensors.items() if t is not None and t.is_floating_point())


def _head(x: Inputs) -> tuple[str, torch.Tensor]:
    """The head, or whatever a family's first parameter is, and its name."""
    name = next((n for n, t in x.tensors.items() if t is not None and n in x.parameters), _first(x))
    return name, x.tensors[name]  # type: ignore[return-value]


def _halve(x: Inputs) -> None:
    x.tensors[_first(x)].detach().mul_(0.5)  # type: ignore[union-attr]


def _clamp_ids(x: Inputs) -> None:
    x.ids.detach().clamp_(min=0, max=0)


def _through_head(call: Adapter, edit: Callable[[torch.Tensor, torch.Tensor], torch.Tensor | None]) -> Adapter:
    """The gradient g of the head is `edit(head, g)`."""

    def adapter(x: Inputs) -> Outputs:
        name, leaf = _head(x)
        return call(x.replace(**{name: through(leaf, functools.partial(edit, leaf))}) if leaf.requires_grad else x)

    return adapter


def _store(leaf: torch.Tensor, g: torch.Tensor) -> None:
    leaf.grad = g.to(leaf.dtype).clone()


def second_call(call: Adapter) -> Adapter:
    """The second call with the same hidden states is off by 1 %."""
    seen: set[bytes] = set()

    def adapter(x: Inputs) -> Outputs:
        key = x.tensors[_first(x)].detach().float().cpu().numpy().tobytes()  # type: ignore[union-attr]
        factor = 1.01 if key in seen else 1.0
        seen.add(key)
        return {name: value * factor for name, value in call(x).items()}

    return adapter


def leftover(call: Adapter) -> Adapter:
    """The buffer for the head's gradient, kept by shape, is not zeroed between calls."""
    buffers: dict[tuple[int, ...], torch.Tensor] = {}

    def add(leaf: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        buffers[tuple(g.shape)] = total = g + buffers.get(tuple(g.shape), torch.zeros_like(g)).to(g.dtype)
        return total

    return _through_head(call, add)


def kept_by_address(call: Adapter) -> Adapter:
    """A copy of the head is kept by its address: an optimizer's step in place goes unseen."""
    copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def adapter(x: Inputs) -> Outputs:
        name, leaf = _head(x)
        _, old = copies.setdefault(leaf.data_ptr(), (leaf.detach(), leaf.detach().clone()))  # the memory stays taken
        return call(x.replace(**{name: leaf + (old - leaf).nan_to_num(0.0).detach()}))

    return adapter


class _Static(torch.autograd.Function):
    """Identity into a buffer."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
        return buffer.copy_(value).detach()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0], None


def static_outputs(call: Adapter) -> Adapter:
    """Outputs stand in one buffer for all calls of a shape, as those of a CUDA graph do."""
    buffers: dict[tuple[Any, ...], torch.Tensor] = {}

    def adapter(x: Inputs) -> Outputs:
        out = call(x)
        keys = {n: (n, v.shape, v.dtype) for n, v in out.items()}
        return {n: _Static.apply(v, buffers.setdefault(keys[n], torch.empty_like(v))) for n, v in out.items()}

    return adapter


def upstream_damaged(call: Adapter) -> Adapter:
    """The backward writes over the gradient that it was given."""

    def spoiled(g: torch.Tensor) -> torch.Tensor:
        copy = g.clone()
        g.mul_(0.5)
        return copy

    return lambda x: {n: through(v, spoiled) if v.requires_grad else v for n, v in call(x).items()}


def alone_missing(call: Adapter) -> Adapter:
    """The gradient of the head is made where the hidden states', or the family's first leaf, is: asked for alone it is 0."""

    def adapter(x: Inputs) -> Outputs:
        first, made = _first(x), list[int]()
        name = next((n for n in x.leaves if n != first), None)
        if name is None or first not in x.leaves:
            return call(x)

        def mark(g: torch.Tensor) -> torch.Tensor:
            made.append(1)
            return g

        late = through(x.tensors[name], lambda g: g if made else torch.zeros_like(g))
        return call(x.replace(**{name: late, first: through(x.tensors[first], mark)}))

    return adapter


def _where(condition: Callable[[], bool]) -> Wrong:
    return lambda call: lambda x: {n: v * 1.01 if condition() else v for n, v in call(x).items()}


def _unasked(x: Inputs) -> None:
    _, leaf = _head(x)
    if not leaf.requires_grad:
        leaf.grad = torch.zeros_like(leaf)


UNSLOTH = "UNSLOTH_RETURN_HIDDEN_STATES"
MISCONDUCT: dict[str, tuple[str, Wrong]] = {
    "environment-left": ("environment variable set and left", _before(lambda x: os.environ.update({UNSLOTH: "1"}))),
    "rng-advanced": ("torch's random numbers advanced", _before(lambda x: torch.rand(1))),
    "python-rng-advanced": ("Python's random numbers advanced", _before(lambda x: random.random())),
    "matmul-precision-left": (
        "float32 matmul precision lowered and left",
        _before(lambda x: torch.set_float32_matmul_precision("medium")),
    ),
    "function-rebound": ("torch.nn.functional.log_softmax patched and left", _before(_rebind)),
    "grad-mode-left": ("gradients switched off on the way out", _after(lambda x: torch.set_grad_enabled(False))),
    "config-changed": (
        "a value of the caller's config changed (temperature set to 1 once it has been folded in)",
        _after(lambda x: setattr(x.settings, "temperature", 1.0)),
    ),
    "hidden-damaged": ("hidden states overwritten in place", _after(_halve)),
    "ids-damaged": ("ignored token ids replaced in place", _after(_clamp_ids)),
    "grad-overwritten": (".grad of the head overwritten instead of added to", lambda call: _through_head(call, _store)),
    "second-call": ("wrong only in the second call", second_call),
    "leftover-gradient": ("gradient buffer not zeroed between calls: state leaks", leftover),
    "kept-by-address": ("a copy of the head kept by its address", kept_by_address),
    "static-outputs": ("outputs of an earlier call overwritten by the next", static_outputs),
    "upstream-damaged": ("upstream gradient overwritten in place", upstream_damaged),
    "alone-missing": ("no gradient of the head unless the hidden states' is asked for too", alone_missing),
    "no-grad": ("wrong under no_grad and inference_mode", _where(lambda: not torch.is_grad_enabled())),
    "inference-mode": ("wrong under inference_mode", _where(torch.is_inference_mode_enabled)),
    "unasked-gradient": ("a frozen head gets a .grad", _before(_unasked)),
}
"""Name -> the mistake in one line, and what makes it."""


def _as_if(t: torch.Tensor, offset: int) -> torch.Tensor:
    """The values that a reader finds who takes `t` for contiguous memory from `offset` on."""
    memory = t.detach().as_strided((t.untyped_storage().nbytes() // t.element_size() - offset,), (1,), offset)
    read = memory.repeat(-(-t.numel() // max(memory.numel(), 1)))[: t.numel()].view(t.shape)
    return t + (read - t).nan_to_num().detach() if t.is_floating_point() else read


def misread(*names: str) -> dict[str, tuple[str, Wrong]]:
    """Mutants that take a tensor for contiguous, by name, and one that forgets the storage offset of each."""

    def reader(chosen: tuple[str, ...], at: Callable[[torch.Tensor], int]) -> Wrong:
        def read(t: torch.Tensor | None) -> torch.Tensor | None:
            plain = t is None or not t.numel() or (t.is_contiguous() and not t.storage_offset())
            return t if plain else _as_if(t, at(t))

        return lambda call: lambda x: call(x.replace(**{n: read(x.tensors.get(n)) for n in chosen if n in x.tensors}))

    found = {f"strides-of-{n}": (f"strides of {n} ignored", reader((n,), torch.Tensor.storage_offset)) for n in names}
    return found | {"offsets-ignored": ("storage offsets ignored", reader(names, lambda t: 0))}


def around(call: Adapter, *names: str) -> dict[str, tuple[str, Adapter]]:
    """Mutants that wrap a correct implementation: misconduct, and tensors `names` misread."""
    return {name: (mistake, wrong(call)) for name, (mistake, wrong) in (MISCONDUCT | misread(*names)).items()}


def misread_upstream(call: Adapter, expanded: bool = False) -> Adapter:
    """Upstream gradients are taken for contiguous; or `expanded` ones, of one value a row, for one value."""

    def wrong(g: torch.Tensor) -> torch.Tensor:
        if expanded:
            return g.flatten()[0].expand_as(g) if g.numel() > 1 and not g.stride()[-1] else g
        return _as_if(g, g.storage_offset()) if g.numel() > 1 and all(g.stride()) else g

    return lambda x: {n: through(v, wrong) if v.requires_grad else v for n, v in call(x).items()}
