"""What mutants are made of: the table `losses.toml`, and edits of gradients, blocks and sums of a correct head."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import operator
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import linear, pad

from cases.selftest.controls import logprobs
from cases.selftest.controls.logprobs import Pair, targets
from parity.case.inputs import Inputs
from parity.implementations.implementation import Adapter

Edit = Callable[[torch.Tensor], torch.Tensor | None]

BLOCK = 8


class _Through(torch.autograd.Function):
    """Identity whose gradient passes through `edit`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, edit: Edit) -> torch.Tensor:
        ctx.edit = edit
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return ctx.edit(grads[0]), None


def through(x: torch.Tensor, edit: Edit) -> torch.Tensor:
    """x, with `edit` applied to its gradient; None drops it."""
    return _Through.apply(x, edit)


def with_gradient(edit: Edit, *names: str) -> Callable[[Inputs], Inputs]:
    """A change of inputs: the gradients of `names` pass through `edit`."""
    return lambda x: x.replace(**{n: through(x.tensors[n], edit) for n in names if x.tensors.get(n) is not None})


def one(t: torch.Tensor, where: torch.Tensor, value: Any) -> torch.Tensor:
    """t with its value exchanged at the first place of `where`."""
    first = (where.flatten().cumsum(0) == 1) & where.flatten()
    return torch.where(first.view(t.shape), value, t)


def blocks(z: torch.Tensor) -> list[torch.Tensor]:
    """The vocabulary in blocks, the last one partial."""
    return list(z.split(BLOCK, -1))


class _Fused(torch.autograd.Function):
    """Log-probs and entropies from logits block by block, with the gradient written by hand."""

    @staticmethod
    def forward(ctx: Any, z: torch.Tensor, index: torch.Tensor, fused: Fused) -> Pair:
        lse = torch.stack([torch.logsumexp(b, -1) for b in fused.blocks(z)]).logsumexp(0)
        logp = z - lse.unsqueeze(-1)
        p = logp.exp()
        entropy = -torch.where(p > 0, p * logp, 0.0).sum(-1)
        ctx.fused, ctx.kept = fused, (p, logp, entropy, index)
        return fused.select(z, index) - lse, entropy

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        p, logp, entropy, index = ctx.kept
        g_logps, g_entropy = ctx.fused.upstream(*grads)
        dz = -p * g_logps.unsqueeze(-1)
        dz = dz.scatter_add(-1, index.unsqueeze(-1), g_logps.unsqueeze(-1))
        surprise = torch.where(p > 0, p * (logp + entropy.unsqueeze(-1)), 0.0)
        return dz - surprise * g_entropy.unsqueeze(-1), None, None


@dataclasses.dataclass(frozen=True)
class Fused:
    """The hooks of the fused pair: blocks of the vocabulary, selected logit, reading of the upstream gradients."""

    blocks: Callable[[torch.Tensor], list[torch.Tensor]] = blocks
    select: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = lambda z, index: z.gather(-1, index[..., None])[
        ..., 0
    ]
    upstream: Callable[[torch.Tensor, torch.Tensor], Pair] = lambda logps, entropy: (logps, entropy)

    def pair(self, x: Inputs, z: torch.Tensor) -> Pair:
        """Log-probs and entropies, about the largest logit."""
        z = z - z.amax(-1, keepdim=True).detach()
        # the mask of ignored tokens is an operation of its own, so the upstream gradient that arrives here was touched
        logps, entropy = _Fused.apply(z, targets(x), self)
        return logps, entropy


class _Summed(torch.autograd.Function):
    """h Wᵀ with the gradient of W summed token by token in a dtype of its own."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        ctx.kept, ctx.dtype = (hidden, weight), dtype
        return linear(hidden, weight).float()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        hidden, weight = ctx.kept
        dz = grads[0].flatten(0, 1)
        total = torch.zeros_like(weight, dtype=ctx.dtype)
        for row, h in zip(dz, hidden.flatten(0, 1), strict=True):
            total += torch.outer(row, h).to(ctx.dtype)
        return grads[0] @ weight, total.to(weight.dtype), None


def summed(dtype: torch.dtype) -> Callable[[Inputs, torch.Tensor], torch.Tensor]:
    """A product step that sums partial gradients of the head in `dtype`."""

    def step(x: Inputs, hidden: torch.Tensor) -> torch.Tensor:
        z = _Summed.apply(hidden, x.weight.float(), dtype)
        return z if x.bias is None else z + x.bias.float()

    return step


Wrong = dict[str, tuple[str, Adapter]]
"""Name -> the mistake in one line, and the adapter that makes it."""


def exchanged(
    family: str, controls: Mapping[str, Callable[..., Any]], names: dict[str, Any]
) -> Iterator[tuple[str, str, dict[str, Callable[..., Any]]]]:
    """Name, mistake and exchanged steps of the family's mutants in `losses.toml`.

    `controls`: the right steps, whose parameters the expressions there have; `names`: what they may name beside the
    functions of this module and of the head's control.
    """
    known = vars(logprobs) | globals() | {"math": math, "pad": pad} | names
    table = tomllib.loads(Path(__file__).with_name("losses.toml").read_text(encoding="utf-8"))
    for name, row in table[family].items():
        mistake = row.pop("mistake")
        heads = {step: ", ".join(inspect.signature(controls[step]).parameters) for step in row}
        yield name, mistake, {step: eval(f"lambda {heads[step]}: {text}", known) for step, text in row.items()}


def scaled_gradients(*leaves: str) -> Iterator[tuple[str, str, Callable[[Inputs], Inputs]]]:
    """Name, mistake and changed inputs of mutants whose gradient of some leaves is too large by 1 % or 0.1 %."""
    for label in ("1e-2", "1e-3"):
        for names in leaves:
            edit = with_gradient(functools.partial(operator.mul, 1 + float(label)), *names.split())
            yield f"grad-{names.replace(' ', '-')}-scaled-{label}", f"gradient of {names} × (1 + {label})", edit


def rounded(g: torch.Tensor) -> torch.Tensor:
    """g in bfloat16, and back."""
    return g.bfloat16().to(g)


def flushed(g: torch.Tensor) -> torch.Tensor:
    """g in float16, and back."""
    return g.clamp(-65504, 65504).half().to(g)


def defaults(*kinds: Any) -> dict[str, Callable[..., Any]]:
    """The steps of a control, by name."""
    return {name: getattr(kind, name) for kind in kinds for name in kind.__dataclass_fields__}
