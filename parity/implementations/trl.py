"""TRL's log-probs: the plain functions, the chunked torch path, and its Triton kernels. Its trainers: trl_trainer.py."""

import dataclasses
import functools
import inspect
from typing import Any

import torch

from parity.case.inputs import Inputs
from parity.families.head import IGNORE_INDEX
from parity.implementations import plain
from parity.implementations.implementation import EVERY_CONTEXT, KERNEL, Outputs, by_token, implementation
from parity.implementations.limits import accepted, found_at, lacking, only, taking
from parity.judge.recipe import Recipe
from parity.upstream import trl

offer = functools.partial(implementation, family="logprobs", library="trl", outputs=frozenset({"entropy"}))
"""The decorator of this file."""
DEFAULT_CHUNK = 32768
CHUNKED = "trl.kernels.chunked_logprob"
NO_ENTROPY = only(
    "no entropy in the installed version",
    lambda s: s.entropy == "none" or found_at("trl.trainer.utils:entropy_from_logits") is not None,
)
UNIGNORED = only("no ignore_index: the caller masks", lambda s: s.ignored == "none")


def softcap(x: Inputs, module: str = CHUNKED) -> str:
    """How a chunked path of TRL takes a tanh: its Triton kernels as 2σ(2x) - 1. It takes them on CUDA; 1.15 everywhere,
    on the CPU in Triton's interpreter."""
    return "sigmoid" if plain.takes_triton(x, module) or trl.chunks_are_triton() else "ieee"


def _stored(x: Inputs) -> Recipe:
    """Everything in the dtype of the head: the plain path. On CUDA releases with a kernel for it call that instead."""
    return plain.stored(x) if plain.takes_triton(x, "trl.kernels.logprob_entropy") else plain.narrow(x)


def tiles(x: Inputs) -> Recipe:
    """A tile of logits and of their gradient in the dtype of the hidden states, to which the head is cast. The gradients
    of head and bias are summed in float32 and take their dtypes from there. Before there were kernels (1.15) the logits'
    gradient was float32."""
    dlogits = "input" if plain.installed("trl.kernels.chunked_logprob") else "fp32"
    return Recipe(logits="input", dlogits=dlogits, tanh=softcap(x), **plain.cast_head(x))


@offer(
    "trl.selective_log_softmax",
    role="reference",
    recipe=_stored,
    contexts=EVERY_CONTEXT,
    sources=("trl.trainer.utils.selective_log_softmax", "trl.trainer.utils.entropy_from_logits"),
    limits=(UNIGNORED, NO_ENTROPY),
)
def selective_log_softmax(x: Inputs) -> Outputs:
    """`selective_log_softmax(logits, ids)` on materialised logits, as the trainer does without a fused head."""
    function, z = accepted("trl.trainer.utils:selective_log_softmax"), plain.logits(x)
    temperature = x.settings.temperature
    scaled = z / temperature if temperature != 1.0 else z
    if "temperature" in inspect.signature(function).parameters:
        out = {"logps": function(z, x.ids.long(), temperature=temperature)}
    else:
        out = {"logps": function(scaled, x.ids.long())}
    if x.settings.entropy != "none":
        entropy, chunk = accepted("trl.trainer.utils:entropy_from_logits"), x.settings.chunk_size or 128
        out["entropy"] = entropy(scaled, **taking(entropy, {"chunk_size": (chunk, chunk)}))
    return out


@offer(
    "trl.selective_log_softmax_and_entropy",
    recipe=_stored,
    contexts=EVERY_CONTEXT,
    sources=("trl.trainer.utils.selective_log_softmax_and_entropy",),
)
def selective_log_softmax_and_entropy(x: Inputs) -> Outputs:
    """`selective_log_softmax_and_entropy(logits, ids, temperature=…, row_mask=…)`: torch path on the CPU, Triton on CUDA."""
    return _both(x, x.ids.long(), "trl.trainer.utils")


@offer(
    "trl.logprob_entropy_kernel",
    recipe=plain.stored,  # and float32 inside the kernel
    sources=("trl.kernels.logprob_entropy.selective_log_softmax_and_entropy",),
    **KERNEL,
)
def logprob_entropy_kernel(x: Inputs) -> Outputs:
    """TRL's fused log-prob and entropy Triton kernel, called directly."""
    return _both(x, x.ids, "trl.kernels")


def _both(x: Inputs, ids: torch.Tensor, module: str) -> Outputs:
    s, function = x.settings, accepted(f"{module}:selective_log_softmax_and_entropy")
    given = {"row_mask": None if s.ignored == "none" else x.ids != IGNORE_INDEX, "temperature": s.temperature}
    learns = s.entropy == "gradient"
    given |= taking(function, {"entropy_requires_grad": (learns, learns)})
    logps, entropy = function(plain.logits(x), ids.clamp(min=0), **given)
    return {"logps": logps} | ({"entropy": entropy} if s.entropy != "none" else {})


def _chunked_function() -> Any:
    """The autograd function, private until 1.14."""
    return found_at(f"{CHUNKED}:ChunkedLogProbFunction") or accepted("trl.trainer.utils:_ChunkedLogProbFunction")


def _chunked_takes(s: Any) -> str:
    """Up to 1.12 some parameters were missing."""
    wanted = {"bias": (s.bias, "none"), "temperature": (s.temperature, 1.0)}
    wanted |= {"final_logit_softcapping": (s.softcap, None), "logit_scale": (s.logit_scale, 1.0)}
    return lacking(_chunked_function().forward, wanted)


@offer(
    "trl.ChunkedLogProbFunction",
    recipe=tiles,
    contexts=EVERY_CONTEXT,
    interpreted=trl.chunks_are_triton(),
    sources=("trl.kernels.chunked_logprob.ChunkedLogProbFunction",),
    limits=(UNIGNORED, _chunked_takes),
)
@offer(
    "trl.chunked_logprob_kernel",
    recipe=lambda x: dataclasses.replace(tiles(x), tanh="sigmoid"),
    around=functools.partial(trl.triton_taken, CHUNKED),
    sources=("trl.kernels.chunked_logprob._forward_kernel", "trl.kernels.chunked_logprob._backward_kernel"),
    limits=(UNIGNORED, _chunked_takes),
    **KERNEL,
)
def _chunked(x: Inputs) -> Outputs:
    """`ChunkedLogProbFunction`, which GRPOTrainer's fused LM head calls, torch on the CPU, Triton on CUDA; and its kernels also
    where the device would take the path in torch."""
    s = x.settings
    function = _chunked_function()
    outputs = ("entropy",) if s.entropy != "none" else ()
    chunk = s.chunk_size or DEFAULT_CHUNK
    targets = x.ids.clamp(min=0).reshape(-1)  # as TRL's fused LM head gives them: the kernel knows no strides
    given = {"bias": (x.bias, None), "targets": (targets, targets), "temperature": (s.temperature, 1.0)}
    given |= {"chunk_size": (chunk, chunk), "final_logit_softcapping": (s.softcap, None)}
    given |= {"logit_scale": (s.logit_scale, 1.0)} | {"outputs": (outputs, outputs)}
    out = function.apply(x.hidden.flatten(0, 1), x.weight, *taking(function.forward, given).values())
    return {"logps": by_token(out[0], x)} | ({"entropy": by_token(out[1], x)} if outputs else {})
