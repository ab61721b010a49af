"""cut-cross-entropy: log-probs as minus the unreduced linear cross entropy.

The released signature has no temperature, logit scale or bias. Temperature and scale multiply the logits, so a caller
folds them into the hidden states, as people do; under a softcap that is another function (the temperature divides after
the cap), and so unsupported here.
"""

import contextlib
import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from parity.case.inputs import Inputs
from parity.families.head import IGNORE_INDEX
from parity.implementations import plain
from parity.implementations.implementation import EVERY_CONTEXT, Outputs, implementation
from parity.implementations.limits import ONE_DTYPE, accepted, fitting, only, taking
from parity.implementations.reduced import ONE_BY_ONE, each_reduced, one_by_one
from parity.judge.recipe import Recipe

SOURCES = (
    "cut_cross_entropy.linear_cross_entropy.linear_cross_entropy",
    "cut_cross_entropy.cce_backward._cce_backward_kernel",
)
BLOCK = 128
"""Block of the backward kernel: the gradients of so many logits make one partial sum, added in the dtype of the gradient."""
FOLDED = only(
    "temperature with a softcap: scaling the hidden states does not apply it",
    lambda s: s.softcap is None or s.temperature == 1.0,
)
FUNCTION = "cut_cross_entropy:linear_cross_entropy"
LIMITS = (fitting(FUNCTION, lambda s: {"bias": (s.bias, "none")}), FOLDED)
RUNS_HERE = (
    only("bf16 tl.dot gives NaN in Triton's interpreter", lambda s: s.device == "cuda" or s.dtype != "bf16"),
    only(
        "V beyond 2,048 takes minutes in Triton's interpreter: run it on CUDA",
        lambda s: s.device == "cuda" or s.V <= 2048,
    ),
    only("torch.compile would trace Triton's interpreter", lambda s: s.device == "cuda" or s.context != "compile"),
    only("its backward refuses float32 hidden states (fp16 and bf16 only)", lambda s: s.dtype != "fp32"),
)


def _call(x: Inputs, **options: Any) -> Outputs:
    """Shifted as a causal language model is: position t predicts label t + 1, the last one nothing; labels are ignored by the
    number that is given."""
    s, linear_cross_entropy = x.settings, accepted(FUNCTION)
    options |= taking(linear_cross_entropy, {"bias": (x.bias, None)})
    rows, ids = plain.folded(x), x.ids.long()
    if "shift" in options:
        rows, ids = torch.nn.functional.pad(rows, (0, 0, 0, 1)), torch.nn.functional.pad(ids, (1, 0))
        ids = ids.where(ids != IGNORE_INDEX, options["ignore_index"])
    return {"logps": -linear_cross_entropy(rows, x.weight, ids, softcap=s.softcap, reduction="none", **options)}


def _kernel(x: Inputs) -> Recipe:
    """float32 logits in blocks (an fp16 dot is as coarse as fp16 logits in the interpreter), gradients summed in place.

    The selected logit comes from a kernel of its own (indexed_dot.py), which rounds each product e·c to the input dtype. On
    CUDA each block's partial gradient is rounded and added to what is stored; in the interpreter, which takes no more than
    2,048 entries, it is an fp16 product itself.
    """
    s = x.settings
    factor = plain.factor(x)
    blocks = max(math.ceil(s.V / BLOCK), math.ceil(s.B * s.T / BLOCK))
    cuda = x.hidden.is_cuda
    return Recipe(
        logits="fp32" if cuda else "input",
        dlogits="input",
        folded=factor,
        selected="input",
        accumulate="input",
        partials=max(2, blocks) if cuda else 8 * blocks,
        partial_terms=BLOCK if cuda else 0,
        inputs=None if factor == 1.0 and x.weight.dtype == x.hidden.dtype else "input",
    )


def _compiled(x: Inputs) -> Recipe:
    factor = plain.factor(x)
    cast = factor != 1.0 or x.weight.dtype != x.hidden.dtype
    capped = x.settings.softcap is not None
    narrow = x.autocast if x.autocast and capped else "input"  # a softcap that follows a narrow product is narrow too
    return Recipe(logits="input", dlogits="input", folded=factor, elementwise=narrow, inputs="input" if cast else None)


@contextlib.contextmanager
def _interpretable() -> Iterator[None]:
    """Where Triton interprets, give the kernels a tanh and a log1p, and a quick "and"."""
    from cut_cross_entropy import tl_utils

    with plain.libdevice(tl_utils.__name__, tl_tanh="tanh", tl_log1p="log1p") as interpreter:
        if interpreter is not None:
            interpreter.reducing_at_once(getattr(tl_utils, "tl_and_reduce_fn", None))
        yield


KERNEL: dict[str, Any] = {
    "family": "logprobs",
    "library": "cut-cross-entropy",
    "recipe": _kernel,
    "contexts": EVERY_CONTEXT,
    "around": _interpretable,
    "interpreted": True,
    "every": 12,
    "sources": SOURCES,
    "limits": (*RUNS_HERE, *LIMITS),
}


def _variant(name: str, impl: str, fields: Mapping[str, Any], **options: Any) -> None:
    implementation(f"cce.{name}", **fields)(functools.partial(_call, impl=impl, **options))


def _reduced(x: Inputs) -> Outputs:
    """Minus the mean, or in every second case the sum, of a position's loss and of ignored ones."""
    function, reduction = accepted(FUNCTION), "mean" if x.case.seed % 2 else "sum"

    def loss(rows: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return function(rows, x.weight, ids, softcap=x.settings.softcap, reduction=reduction, filter_eps=None)

    return each_reduced(x, loss, reduction)


_variant("default", "cce", {**KERNEL, "seeks": frozenset({"rare"})})  # as it comes: gradient filtering at "high"
_variant("auto", "cce", {**KERNEL, "every": 16}, filter_eps="auto")
_variant("unfiltered", "cce", KERNEL, filter_eps=None)  # every block of the gradient
SHIFTED: dict[str, Any] = {"filter_eps": -math.inf, "shift": True, "ignore_index": -1}  # and filters nothing either
_variant("shifted", "cce", {**KERNEL, "every": 16}, **SHIFTED)
implementation(
    "cce.reduced",
    **KERNEL | {"recipe": lambda x: one_by_one(_kernel(x), x, "mean"), "limits": (*KERNEL["limits"], ONE_BY_ONE)},
)(_reduced)
_variant(
    "torch_compile",
    "torch_compile",
    {
        "family": "logprobs",
        "library": "cut-cross-entropy",
        "recipe": _compiled,
        "contexts": frozenset({"plain", "autocast", "checkpoint"}),
        "every": 24,
        "sources": ("cut_cross_entropy.torch_compile.torch_compile_linear_cross_entropy",),
        "limits": (*LIMITS, ONE_DTYPE),
    },
)
