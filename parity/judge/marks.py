"""Marks: where an oracle's definition lets a recipe store a narrower dtype; an exact run stores nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Literal, Protocol

import torch

from parity.judge.monte_carlo import RUNNING, MonteCarlo


class Mark(Protocol):
    """What an oracle calls where a recipe may store or round; see `recipe_mark`."""

    def __call__(
        self,
        name: str,
        x: torch.Tensor,
        size: Callable[[], torch.Tensor] | None = None,
        along: Callable[[], torch.Tensor] | None = None,
    ) -> torch.Tensor: ...


def exact_mark(
    name: str,
    x: torch.Tensor,
    size: Callable[[], torch.Tensor] | None = None,
    along: Callable[[], torch.Tensor] | None = None,
) -> torch.Tensor:
    """The mark of an exact run: nothing is stored narrower than float64."""
    return x


def recipe_mark(mode: MonteCarlo) -> Mark:
    """The marks at which an oracle tells where a recipe may store a narrower dtype.

    An oracle calls `mark("parameter", x)` on hidden states and weight before use, `mark("bias", b)` on a bias,
    `mark("states", x)` on what a model stores in its own dtype whatever the implementation, `mark("use", w)` on a parameter
    at each of several uses, whose gradients autograd stores in its dtype and adds, `mark("operand", h)` where several
    products take the same tensor and each stores its gradient as it stores its logits', `mark("logits", z)` on logits
    as a matrix product leaves them and `mark("biased", z, size)` on their sum with a bias, with `size()` what is to be
    added where a kernel's running sum begins with the bias, `mark("teacher", z, …)` on a teacher's in both places,
    `mark("log-probs", logps)` on log-probs that a kernel takes, whose gradient it may store, `mark("selected", logps, size)`
    on the selected log-probs, with `size()` the root of the sum of squares of the products that make the selected logit, and
    `mark("entropy", h, size, along)` on an entropy, with `size()` the terms of logsumexp(z) - E[z], as which it may be
    computed, and `along()` a function of the logits along whose gradient the rounding of E[z] enters the entropy's gradient;
    `mark("divergence", zero, size, along)` makes of 0 such a rounding of the student's divergence.
    """
    recipe = mode.recipe
    table = {
        "parameter": (recipe.inputs, recipe.dinputs or recipe.inputs),
        "states": (mode.dtype, mode.dtype),
        "use": (None, mode.dtype),
        "operand": (None, recipe.dlogits),
        "bias": (recipe.bias or recipe.inputs, recipe.bias or recipe.dinputs or recipe.inputs),
        "logits": (recipe.logits, recipe.dlogits),
        "biased": (recipe.bias or recipe.logits, recipe.bias or recipe.dlogits),
        "teacher": (recipe.teacher or recipe.logits, recipe.dlogits),
        "log-probs": (None, recipe.log_probs),
    }

    def mark(
        name: str,
        x: torch.Tensor,
        size: Callable[[], torch.Tensor] | None = None,
        along: Callable[[], torch.Tensor] | None = None,
    ) -> torch.Tensor:
        if name in ("entropy", "divergence"):
            return x if size is None else mode.spread(x, size, "fp32", along)
        if name == "selected":
            return x if recipe.selected == "fp32" or size is None else mode.spread(x, size, recipe.selected)
        forward, backward = table[name]
        x = x if size is None else mode.spread(x, size, "fp32")
        x = mode.held(x) if name == "bias" else x
        return mode.stored(x, forward, backward, recipe.folded if name in ("logits", "biased") else 1.0)

    return mark


def log_softmax_again(z: torch.Tensor, logps: torch.Tensor) -> torch.Tensor:
    """log-softmax of z, (…, V), for a second use beside `logps`: in half of the replicas that same, in the others its own.

    One backward pass adds both gradients up before it sums them over the vocabulary, and equal terms drift with the
    largest of either; two passes round each gradient by itself, where together they may cancel. Both are correct.
    """
    if not RUNNING:
        return logps
    own = torch.log_softmax(z, -1)
    return torch.where(RUNNING[-1].noise.each(own) > 0, own, logps)


@contextlib.contextmanager
def of_teacher(part: Literal["softmax", "elementwise"]) -> Iterator[None]:
    """What an oracle computes of a teacher alone, without gradient: rounded as the recipe's `teacher_<part>` says.

    "softmax" is the way from its logits to its log-probs, "elementwise" what is computed of its log-probs. An exact run
    rounds nothing.
    """
    mode = RUNNING[-1] if RUNNING else None
    dtype = None if mode is None else getattr(mode.recipe, f"teacher_{part}")
    if mode is None or dtype is None:
        yield
        return
    before = mode.elementwise, mode.softmax
    mode.take(dtype, dtype)
    try:
        yield
    finally:
        mode.take(*before)
