"""torch's own code: log-probs as minus the unreduced `linear_cross_entropy`, public since 2.13, and a compiled clip.

The first has no temperature, logit scale or softcap; a caller folds the first two into the hidden states. `chunk_size` of a case
is the number of tokens in a chunk. Without `options` it is plain logits and torch's cross entropy, which others show.
"""

import functools
import math
from typing import Any
from unittest import mock

import torch

from parity.case.inputs import Inputs
from parity.families.head import IGNORE_INDEX
from parity.families.policy_settings import SETTINGS
from parity.implementations import plain
from parity.implementations.implementation import EVERY_CONTEXT, Outputs, by_token, implementation
from parity.implementations.liger import NO_SOFTCAP, UNBIASED
from parity.implementations.limits import ONE_DTYPE, Limit, accepted, found_at, only
from parity.implementations.reduced import ONE_BY_ONE, class_weights, each_reduced, one_by_one
from parity.judge.recipe import Recipe

LIMITS = (
    ONE_DTYPE,
    NO_SOFTCAP,
    UNBIASED,
    only(
        "scale or temperature in float16: the gradient of scaled hidden states flushes to 0",
        lambda s: s.logit_scale == s.temperature or s.dtype != "fp16",
    ),
)
offer = functools.partial(
    implementation,
    family="logprobs",
    library="torch",
    contexts=EVERY_CONTEXT,
    sources=("torch.nn.functional.linear_cross_entropy", "torch.nn.LinearCrossEntropyOptions"),
    limits=LIMITS,
)
"""The decorator of this file."""


def _call(x: Inputs, reduction: str = "none", **options: Any) -> Outputs:
    """Minus `linear_cross_entropy`, with `LinearCrossEntropyOptions()` as it comes "accurate" on a CPU."""
    s = x.settings
    function = accepted("torch.nn.functional:linear_cross_entropy")
    chosen = accepted("torch.nn:LinearCrossEntropyOptions")(batch_chunk_size=s.chunk_size, **options)
    given = {"linear_bias": x.bias, "reduction": reduction, "ignore_index": IGNORE_INDEX, "options": chosen}

    if reduction == "mean":
        given["weight"] = class_weights(x)

    def loss(rows: torch.Tensor, ids: torch.Tensor) -> Any:
        return function(rows, x.weight, ids, **given)

    if reduction != "none":
        return each_reduced(x, loss, reduction)
    return {"logps": by_token(-loss(plain.folded(x).flatten(0, 1), x.ids.flatten().long()), x)}


def _accurate(x: Inputs, **more: Any) -> Recipe:
    """float32 inside; each chunk's gradient of head and bias is rounded and added to what is stored. Without a size,
    tokens x vocabulary of a chunk of tokens are at most twice tokens x hidden size."""
    s, factor = x.settings, plain.factor(x)
    chunks = math.ceil(s.B * s.T / s.chunk_size) if s.chunk_size else min(2 * math.ceil(s.V / s.H), s.B * s.T)
    inputs = None if factor == 1.0 else "input"
    return Recipe(folded=factor, accumulate="input", partials=2 * chunks, inputs=inputs, output="input", **more)


def _of_calls(x: Inputs, reduction: str) -> Recipe:
    return one_by_one(_accurate(x), x, reduction)


def _sums_narrow(x: Inputs) -> Recipe:
    """The same; logits and probabilities in float16 where the inputs are, products of the gradient of the hidden states in
    the dtype of the inputs."""
    if x.case.dtype != "fp16":
        return _accurate(x)
    return _accurate(x, logits="input", dlogits="input", elementwise="input", softmax="input")


def _in_installed(policy: str) -> Limit:
    """2.15 has no "balanced"."""
    options, refused = found_at("torch.nn:LinearCrossEntropyOptions"), False
    try:
        options and options(acc_policy=policy)
    except ValueError:
        refused = True
    return only(f"no acc_policy {policy!r} in the installed version", lambda s: not refused)


offer("torch.linear_cross_entropy", recipe=_accurate)(_call)
for kind in ("mean", "sum"):  # gradients of the forward pass: as the option stands a second backward pass is refused
    reduced = functools.partial(_call, reduction=kind, allow_retain_graph=True)
    offer(
        f"torch.linear_cross_entropy.{kind}",
        recipe=functools.partial(_of_calls, reduction=kind),
        every=4,
        limits=(*LIMITS, ONE_BY_ONE),
    )(reduced)
for policy in ("balanced", "compact"):  # compact: the head's gradient is summed in its own dtype
    narrow = functools.partial(_call, acc_policy=policy, acc_dtype=torch.float32)
    limits = (*LIMITS, _in_installed(policy))
    offer(f"torch.linear_cross_entropy.{policy}", recipe=_sums_narrow, limits=limits)(narrow)


CLIP = (
    "B T V H peak temperature epsilon old lengths advantages mask_dtype ids_dtype layout layouts grad cotangent".split()
)


@implementation(
    "torch.compiled_clip",
    family="policy",
    library="torch",
    dtypes=frozenset({"fp32"}),
    limits=(
        only(
            "GRPO's clip alone", lambda s: all(getattr(s, n) == SETTINGS[n].default for n in SETTINGS if n not in CLIP)
        ),
        only("advantages of sequences", lambda s: s.advantages not in ("token", "repeated")),
    ),
    opt_in=True,
    every=20,
)
def compiled_clip(x: Inputs) -> Outputs:
    """GRPO's loss whose clip is one compiled function of ε, called with two other ε before, forward and backward.

    With torch's cache of programs that have a backward, which is on by default and off in a worker.
    """
    import torch
    from torch._functorch import aot_autograd

    s, mask = x.settings, x.mask.bool()
    lp = torch.log_softmax(plain.logits(x) / s.temperature, -1).gather(-1, x.ids.long().unsqueeze(-1)).squeeze(-1)
    ratio = torch.where(mask, lp - (lp.detach() if x.old_logps is None else x.old_logps), 0.0).exp()
    torch.compiler.reset()
    clip = torch.compile(lambda w, e: w.clamp(1 - e, 1 + e), options={"compile_threads": 1})
    with mock.patch.object(aot_autograd, "should_use_local_autograd_cache", return_value=True), torch.enable_grad():
        for e in (s.epsilon / 4, s.epsilon / 2):
            clip(ratio.detach().requires_grad_(), e).sum().backward()
        clipped = clip(ratio, s.epsilon)
    a = x.advantages.unsqueeze(-1)
    terms = torch.where(mask, -torch.minimum(ratio * a, clipped * a), 0.0)
    return {"loss": (terms.sum(-1) / mask.sum(-1).clamp(min=1)).mean()}
