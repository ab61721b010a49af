"""Mutants with right results and wrong side effects: changed inputs, environment, random state, patched functions."""

from __future__ import annotations

import os
import random
from collections.abc import Callable

import torch

from parity.case.inputs import Inputs
from parity.implementations.implementation import Adapter, Outputs
from parity.selftest.mutants.steps import through

Wrong = Callable[[Adapter], Adapter]


def _before(act: Callable[[Inputs], object]) -> Wrong:
    def wrong(call: Adapter) -> Adapter:
        def adapter(x: Inputs) -> Outputs:
            act(x)
            return call(x)

        return adapter

    return wrong


def _after(act: Callable[[Inputs], object]) -> Wrong:
    def wrong(call: Adapter) -> Adapter:
        def adapter(x: Inputs) -> Outputs:
            out = call(x)
            act(x)
            return out

        return adapter

    return wrong


def _rebind(x: Inputs) -> None:
    plain = torch.nn.functional.log_softmax
    torch.nn.functional.log_softmax = lambda *args, **kwargs: plain(*args, **kwargs)


def _first(x: Inputs) -> str:
    """The hidden states, or whatever a family's first tensor is."""
    return next(n for n, t in x.tensors.items() if t is not None and t.is_floating_point())


def _parameter(x: Inputs) -> str:
    """The head, or whatever a family's first parameter is."""
    return next((n for n, t in x.tensors.items() if t is not None and n in x.parameters), _first(x))


def _halve(x: Inputs) -> None:
    x.tensors[_first(x)].detach().mul_(0.5)  # type: ignore[union-attr]


def _clamp_ids(x: Inputs) -> None:
    x.ids.detach().clamp_(min=0, max=0)


def overwritten(call: Adapter) -> Adapter:
    """The backward pass stores into .grad of the head itself, where it should add."""

    def adapter(x: Inputs) -> Outputs:
        name = _parameter(x)
        leaf = x.tensors[name]
        assert leaf is not None

        def store(g: torch.Tensor) -> None:
            leaf.grad = g.to(leaf.dtype).clone()

        return call(x.replace(**{name: through(leaf, store)}) if leaf.requires_grad else x)

    return adapter


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

    def adapter(x: Inputs) -> Outputs:
        def add(g: torch.Tensor) -> torch.Tensor:
            buffers[tuple(g.shape)] = total = g + buffers.get(tuple(g.shape), torch.zeros_like(g)).to(g.dtype)
            return total

        name = _parameter(x)
        leaf = x.tensors[name]
        assert leaf is not None
        return call(x.replace(**{name: through(leaf, add)}) if leaf.requires_grad else x)

    return adapter


def unasked(call: Adapter) -> Adapter:
    """A frozen head gets a gradient."""

    def adapter(x: Inputs) -> Outputs:
        leaf = x.tensors[_parameter(x)]
        assert leaf is not None
        if not leaf.requires_grad:
            leaf.grad = torch.zeros_like(leaf)
        return call(x)

    return adapter


MISCONDUCT: dict[str, tuple[str, Wrong]] = {
    "environment-left": (
        "environment variable set and left",
        _before(lambda x: os.environ.__setitem__("UNSLOTH_RETURN_HIDDEN_STATES", "1")),
    ),
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
    "grad-overwritten": (".grad of the head overwritten instead of added to", overwritten),
    "second-call": ("wrong only in the second call", second_call),
    "leftover-gradient": ("gradient buffer not zeroed between calls: state leaks", leftover),
    "unasked-gradient": ("a frozen head gets a .grad", unasked),
}
"""Name -> the mistake in one line, and what makes it."""
ANYWHERE = frozenset(MISCONDUCT) - {"config-changed", "ids-damaged", "unasked-gradient"}
"""Misconduct that any family shows: no temperature, no token ids and no frozen parameter is needed for it."""
