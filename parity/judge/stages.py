"""Where a definition lets an implementation store a narrower dtype: `stored`. An exact run stores nothing."""

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Literal

import torch

from parity.judge.identities import Through, in_front
from parity.judge.monte_carlo import RUNNING, MonteCarlo
from parity.judge.recipe import DTYPES, NAMES, NARROW, UNIT_ROUNDOFF

Sized = Callable[[], torch.Tensor]
FOLDED = "hidden", "logits", "unbiased", "biased"
"""What is stored with a recipe's `folded` factor on it."""


def stored(
    x: torch.Tensor, stage: str = "input", size: Sized | None = None, along: Sized | None = None
) -> torch.Tensor:
    """x, in a definition, where an implementation may keep it, and its gradient, in a narrower dtype.

    An exact run returns x. A replica rounds it as the recipe says of the stage:

    - "input": in the dtype that it has by those of the inputs, without casts to wider ones; "fp16" or "bf16": in that dtype
      whatever the recipe;
    - "parameter": a weight before use; "hidden": hidden states, with the recipe's `folded` on them; "bias": a bias; "states":
      what a model keeps in its own dtype whatever the implementation; "use": a parameter at each of several uses, whose
      gradients autograd stores in its dtype and adds; "operand": what several products take, each of which stores its gradient
      as it stores its logits';
    - "logits": logits as a matrix product leaves them; "unbiased": the same where a bias is added next, which half of the
      replicas do before they store anything (one `addmm`, or a product and a sum); "biased": that sum, with `size()` what
      is to be added where a kernel's running sum begins with the bias; "teacher", "unbiased teacher": a teacher's;
    - "log-probs": log-probs that a kernel takes, whose gradient it may store; "selected": the selected ones, with `size()`
      the root of the sum of squares of the products that make the selected logit; "target": the same where half of the
      replicas make that logit by a float32 product of its own, which is off by 2u·`size()`;
    - "entropy": an entropy, with `size()` the terms of logsumexp(z) - E[z], as which it may be computed, and `along()` a
      function of the logits along whose gradient the rounding of E[z] enters the entropy's gradient; "divergence" makes of
      0 such a rounding of the student's divergence.

    Raises:
        ValueError: for a stage that is none of these.
    """
    if not RUNNING:
        return x
    mode = RUNNING[-1]
    if stage in ("entropy", "divergence"):
        unshifted = stage == "entropy" and mode.recipe.entropy == "unshifted"
        return (
            x
            if size is None
            else mode.spread(x, (lambda: size() + size() ** 2 / 4) if unshifted else size, "fp32", along)
        )
    if stage == "selected":
        return x if mode.recipe.selected == "fp32" or size is None else mode.spread(x, size, mode.recipe.selected)
    if stage == "target":
        return x if size is None else mode.shifted(x, size)
    forward, backward = _dtypes(mode, stage, kept_dtype(x))
    x = x if size is None else mode.spread(x, size, "fp32")
    x = mode.held(x) if stage == "bias" else x
    out = mode.stored(x, forward, backward, mode.recipe.folded if stage in FOLDED else 1.0)
    out = of_dtype(out, own_dtype(x), kept_dtype(x))
    if "weights" in vars(x):
        scores, before = vars(x)["weights"]  # see `attention`
        vars(out)["weights"] = scores, lambda weights: stored(before(weights), stage)
    if not stage.startswith("unbiased") or out is x or mode.recipe.bias:
        return out
    return torch.where(in_front(lambda x: mode.noise.constant(math.sqrt(2), x) > 0, x), x, out)


def scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
    """x·factor on logits. Where a recipe has the factor on the parameters (`folded`) and rounds elementwise in 16 bits, nothing
    is multiplied here: neither the product is rounded nor the gradient, which `stored` flushes to 0 without the factor.
    """
    mode = RUNNING[-1] if RUNNING else None
    if mode is None or mode.recipe.folded == 1.0 or UNIT_ROUNDOFF[mode.recipe.elementwise] <= NARROW:
        return x * factor

    def times(x: torch.Tensor) -> torch.Tensor:
        with mode.unrounded():
            return x * factor

    return Through.apply(x, times(x.detach()), times)


def own_dtype(x: torch.Tensor) -> torch.dtype | None:
    """The dtype that a definition's float64 tensor stands for, where it is known."""
    return vars(x).get("own_dtype")


def kept_dtype(x: torch.Tensor) -> torch.dtype | None:
    """The dtype that it would have without casts to wider ones, in which `stored` keeps it."""
    return vars(x).get("kept_dtype")


def of_dtype(x: torch.Tensor, dtype: torch.dtype | None, kept: torch.dtype | None = None) -> torch.Tensor:
    """x, which stands for a tensor of that dtype."""
    vars(x).update(own_dtype=dtype, kept_dtype=kept or dtype)
    return x


def _dtypes(mode: MonteCarlo, stage: str, own: torch.dtype | None) -> tuple[str | None, str | None]:
    """In which dtypes a stage stores its value and its gradient; None: as they are. `own`: that of what is stored."""
    recipe = mode.recipe
    kept = recipe.kept or (mode.dtype if own is None else NAMES[own])
    table = {
        "input": (kept, kept),
        "parameter": (recipe.inputs, recipe.dinputs or recipe.inputs),
        "hidden": (recipe.inputs, recipe.dinputs or recipe.inputs),
        "states": (mode.dtype, mode.dtype),
        "use": (None, mode.dtype),
        "operand": (None, recipe.dlogits),
        "bias": (recipe.bias or recipe.inputs, recipe.bias or recipe.dinputs or recipe.inputs),
        "logits": (recipe.logits, recipe.dlogits),
        "unbiased": (recipe.logits, recipe.dlogits),
        "biased": (recipe.bias or recipe.logits, recipe.bias or recipe.dlogits),
        "teacher": (recipe.teacher or recipe.logits, recipe.dlogits),
        "unbiased teacher": (recipe.teacher or recipe.logits, recipe.dlogits),
        "log-probs": (None, recipe.log_probs),
    } | {name: (name, name) for name in DTYPES}
    if stage not in table:
        raise ValueError(
            f"stored(x, {stage!r}): the stages are {', '.join(table)}, selected, target, entropy, divergence"
        )
    return table[stage]


def by_index(x: torch.Tensor, leaf: torch.Tensor | None, index: torch.Tensor, factor: float) -> torch.Tensor:
    """x, to which factor·leaf[index] was added: an implementation may take these from the leaf by themselves, so that the leaf's
    gradient has a part that is summed by index."""
    if not RUNNING or leaf is None or not leaf.requires_grad:
        return x
    return RUNNING[-1].by_index(x, leaf, index, factor)


def log_softmax(z: torch.Tensor, size: Sized) -> torch.Tensor:
    """log-softmax of logits z, (…, V), whose backward may make the probabilities again: p = exp(z - L) with L the stored
    log-sum-exp, and z another product of the same states and head (in a fused kernel: transposed, split, strided).

    In half of the replicas p is off by the factor 1 + δ: by what two float32 products differ in, `size()` the sum of the
    absolute values of what is added up to a logit, (…, V), and in common to a row by the rounding of L, u·2√2·|L|. The rows
    of p then sum to 1 no longer, where a log-softmax and its own gradient do to the last bit.
    """
    logps = torch.log_softmax(z, -1)
    if not RUNNING or not z.requires_grad:
        return logps
    return RUNNING[-1].made_again(logps, z, size)


def log_softmax_again(z: torch.Tensor, logps: torch.Tensor) -> torch.Tensor:
    """log-softmax of z, (…, V), for a second use beside `logps`: in half of the replicas that same, in the others its own.

    One backward pass adds both gradients up before it sums them over the vocabulary, and equal terms drift with the
    largest of either; two passes round each gradient by itself, where together they may cancel. Both are correct.
    """
    if not RUNNING:
        return logps
    own = torch.log_softmax(z, -1)
    noise = RUNNING[-1].noise
    return torch.where(in_front(lambda own: noise.each(own) > 0, own), own, logps)


def of_teacher(part: Literal["softmax", "elementwise"]) -> contextlib.AbstractContextManager[None]:
    """What an oracle computes of a teacher alone, without gradient: rounded as the recipe's `teacher_<part>` says.

    "softmax" is the way from its logits to its log-probs, "elementwise" what is computed of its log-probs. An exact run
    rounds nothing.
    """
    return in_dtype(getattr(RUNNING[-1].recipe, f"teacher_{part}") if RUNNING else None)


@contextlib.contextmanager
def in_dtype(dtype: str | None) -> Iterator[None]:
    """What a definition computes in `dtype` whatever the recipe, log-softmax included; None: as the recipe says."""
    mode = RUNNING[-1] if RUNNING else None
    if mode is None or dtype is None:
        yield
        return
    before = mode.elementwise, mode.softmax
    mode.take(dtype, dtype)
    try:
        yield
    finally:
        mode.take(*before)
