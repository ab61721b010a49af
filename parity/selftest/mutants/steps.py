"""A correct head, from hidden states to log-probs and entropies, cut into steps of which a mutant exchanges one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import linear

from parity.case.inputs import Inputs
from parity.families.logprobs import IGNORE_INDEX
from parity.implementations import plain
from parity.implementations.implementation import Outputs

Pair = tuple[torch.Tensor, torch.Tensor]
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


def product(x: Inputs, hidden: torch.Tensor) -> torch.Tensor:
    """h Wᵀ + b and a LoRA adapter's share, in float32."""
    z = linear(hidden, x.weight.float(), None if x.bias is None else x.bias.float())
    if x.settings.__dict__.get("head") == "lora":
        z = z + linear(linear(hidden, x.lora_a.float()), x.lora_b.float())
    return z.float()


def scaled(x: Inputs, z: torch.Tensor) -> torch.Tensor:
    """scale·z."""
    return z * x.settings.logit_scale


def capped(x: Inputs, z: torch.Tensor) -> torch.Tensor:
    """c·tanh(z/c)."""
    c = x.settings.softcap
    return z if c is None else c * torch.tanh(z / c)


def cooled(x: Inputs, z: torch.Tensor) -> torch.Tensor:
    """z/τ."""
    return z / x.settings.temperature


def finish(x: Inputs, z: torch.Tensor) -> torch.Tensor:
    """softcap(scale·z)/τ."""
    return cooled(x, capped(x, scaled(x, z)))


def targets(x: Inputs) -> torch.Tensor:
    """Token ids with the ignored ones at 0."""
    return x.ids.long().clamp(min=0)


def pair(x: Inputs, z: torch.Tensor) -> Pair:
    """z[id] - logsumexp(z), and logsumexp(z) - Σ p z, about the largest logit."""
    z = z - z.amax(-1, keepdim=True).detach()
    lse = torch.logsumexp(z, -1)
    p = (z - lse.unsqueeze(-1)).exp()
    entropy = lse - (p * z.masked_fill(z == -torch.inf, 0.0)).sum(-1)
    return z.gather(-1, targets(x).unsqueeze(-1)).squeeze(-1) - lse, entropy


def kept(x: Inputs, value: torch.Tensor) -> torch.Tensor:
    """0 where the id is -100."""
    return value.masked_fill(x.ids == IGNORE_INDEX, 0.0)


@dataclasses.dataclass(frozen=True)
class Steps:
    """The steps in order: inputs as they are read, states, logits, the way to their final form, the two outputs."""

    read: Callable[[Inputs], Inputs] = lambda x: x
    states: Callable[[Inputs], torch.Tensor] = lambda x: plain.states(x).float()
    product: Callable[[Inputs, torch.Tensor], torch.Tensor] = product
    finish: Callable[[Inputs, torch.Tensor], torch.Tensor] = finish
    pair: Callable[[Inputs, torch.Tensor], Pair] = pair
    kept: Callable[[Inputs, torch.Tensor], torch.Tensor] = kept
    logps: Callable[[Inputs, torch.Tensor], torch.Tensor] = lambda x, logps: logps
    entropy: Callable[[Inputs, torch.Tensor], torch.Tensor] = lambda x, entropy: entropy

    def head(self, x: Inputs) -> Pair:
        """Log-probs and entropies, (B, T)."""
        x = self.read(x)
        logps, entropy = self.pair(x, self.finish(x, self.product(x, self.states(x))))
        return self.logps(x, self.kept(x, logps)), self.entropy(x, self.kept(x, entropy))

    def call(self, x: Inputs) -> Outputs:
        """As an adapter of family `logprobs`."""
        logps, entropy = self.head(x)
        return {"logps": logps} | ({"entropy": entropy} if x.settings.entropy != "none" else {})


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
    select: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = lambda z, index: z.gather(
        -1, index.unsqueeze(-1)
    ).squeeze(-1)
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
