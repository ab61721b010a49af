"""Logits in plain torch, for losses that take logits instead of hidden states and head."""

import contextlib
import importlib.util
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from parity.case.inputs import Inputs, autocast_of
from parity.implementations.limits import only
from parity.judge.recipe import Recipe


def states(x: Inputs) -> torch.Tensor:
    """Hidden states (B, T, H) as the LM head receives them; a tied head adds the embedding of the previous token."""
    if getattr(x.settings, "head", "plain") == "tied":
        return x.hidden + embedded(x.previous_ids, x.weight)
    return x.hidden


def embedded(ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Rows of a weight, their gradients summed in float32: torch adds those of an embedding in its dtype, one after another,
    0.6 % off at 4,097 rows in float16, which is no loss's error."""
    return torch.nn.functional.embedding(ids, weight.float()).to(weight.dtype)


def logits(x: Inputs, capped: bool = True) -> torch.Tensor:
    """softcap(scale·(h Wᵀ + b)), (B, T, V), in the dtype of the head, as transformers' Gemma-2 and Cohere models do."""
    s = x.settings
    z = torch.nn.functional.linear(cast(x, states(x)), x.weight, x.bias)
    if s.logit_scale != 1.0:
        z = z * s.logit_scale
    if capped and s.softcap is not None:
        z = torch.tanh(z / s.softcap) * s.softcap
    return z


def cast(x: Inputs, hidden: torch.Tensor) -> torch.Tensor:
    """Hidden states in the dtype of the head, as a model with a float32 head casts them; autocast does it by itself."""
    return hidden if autocast_of(x.settings) else hidden.to(x.weight.dtype)


def upstream(x: Inputs) -> float:
    """|upstream gradient of the loss|, at most 1: what gradients meet late that a loss takes in its forward pass."""
    factor = abs(float(x.cotangents["loss"]))
    return min(1.0, factor) if factor > 0.0 else 1.0


def late(x: Inputs) -> dict[str, Any]:
    """Fields of the recipe of a loss that takes its gradients in the forward pass, and multiplies them in plain torch."""
    return {"upstream": upstream(x), "cotangent": cotangent(x)}


def cotangent(x: Inputs) -> str:
    """The dtype in which torch multiplies a 16-bit gradient by a loss's upstream gradient, a tensor of no dimensions."""
    return "input" if x.hidden.is_cuda else "fp32"


def autocast_softmax(x: Inputs) -> str:
    """The dtype of a log-softmax under autocast: CUDA takes it to float32, the CPU does not."""
    return "fp32" if x.device.type == "cuda" else str(x.autocast)


TWO_DTYPES = only(
    "under autocast to float16 a CPU takes kl_div alone to float32; where p underflows no recipe describes it",
    lambda s: s.context != "autocast_fp16" or s.device != "cpu",
)
"""Of divergences in plain torch: the mixture is float16, terms that cancel underflow on one side."""


def stored(x: Inputs, *names: str, **more: Any) -> Recipe:
    """Logits, their gradient and what is made of them in the dtype of the head, under autocast in autocast's; `names`: fields
    of the recipe that have it too."""
    dtype = x.autocast or head_dtype(x)
    fields: dict[str, Any] = dict.fromkeys(("logits", "dlogits", "elementwise", *names), dtype)
    return Recipe(**fields, **more)


def narrow(x: Inputs) -> Recipe:
    """The log-softmax too in the dtype of the head, and the result; under autocast in autocast's."""
    return stored(x, softmax=autocast_softmax(x)) if x.autocast else stored(x, "softmax", "output")


def takes_triton(x: Inputs, module: str = "triton") -> bool:
    """Whether a library with a Triton path for CUDA takes it here: on CUDA, with Triton, in a release that has `module`."""
    return x.hidden.is_cuda and installed("triton") and installed(module)


def installed(module: str) -> bool:
    """Whether a module is installed; of one in a package, the package too."""
    parent = module.rpartition(".")[0]
    return (not parent or installed(parent)) and importlib.util.find_spec(module) is not None


def cast_head(x: Inputs) -> dict[str, Any]:
    """Fields of the recipe of a loss that casts the head to the dtype of the hidden states, gradients in float32."""
    return {} if x.weight.dtype == x.hidden.dtype else {"inputs": "input", "dinputs": "fp32"}


def head_dtype(x: Inputs) -> str:
    """The dtype in which the head leaves logits, as a recipe names it."""
    return "fp32" if x.weight.dtype == torch.float32 else "input"


def folded(x: Inputs) -> torch.Tensor:
    """Hidden states times `factor`."""
    return x.hidden if factor(x) == 1.0 else x.hidden * factor(x)


def factor(x: Inputs) -> float:
    """Scale over temperature: what an adapter multiplies the hidden states by where the library takes neither."""
    return float(x.settings.logit_scale / x.settings.temperature)


@contextlib.contextmanager
def libdevice(module: str, **names: str) -> Iterator[Any]:
    """Where Triton interprets, a module has functions of `interpreter`, which is given, for those of libdevice, stubs there."""
    import triton

    if not triton.knobs.runtime.interpret:
        yield None
        return
    from parity.implementations import interpreter

    there = [name for name in names if hasattr(importlib.import_module(module), name)]
    with mock.patch.multiple(module, **{name: getattr(interpreter, names[name]) for name in there}):
        yield interpreter
