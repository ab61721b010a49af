"""Controls of family `logprobs`: correct log-probs and entropies with other algorithms, each with its true recipe."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import linear, log_softmax

from parity.case.inputs import Inputs
from parity.families.logprobs import IGNORE_INDEX
from parity.implementations import plain
from parity.implementations.implementation import require
from parity.recipe import Recipe

Pair = tuple[torch.Tensor, torch.Tensor]

BLOCK = 5
TILE = 4


@dataclasses.dataclass(frozen=True)
class Head:
    """An algorithm from hidden states to log-probs and entropies, both (B, T), and the recipe it computes in."""

    call: Callable[[Inputs], Pair]
    recipe: Callable[[Inputs], Recipe]


def ieee(x: Inputs) -> Recipe:
    """float32 throughout; the tanh of a kernel would be another recipe."""
    return Recipe()


def stored(x: Inputs) -> Recipe:
    """Logits and their gradient in the dtype of the head, float32 after that."""
    dtype = plain.head_dtype(x)
    return Recipe(logits=dtype, dlogits=dtype)


def tiled(x: Inputs) -> Recipe:
    """As `stored`, partial gradients of the head summed in its dtype; under autocast in that of its cast copy."""
    dtype = plain.head_dtype(x)
    accumulate = "bf16" if x.settings.context == "autocast" else dtype
    return Recipe(logits=dtype, dlogits=dtype, accumulate=accumulate, partials=-(-x.ids.numel() // TILE))


def split(x: Inputs) -> Recipe:
    """float32; under autocast the chunks' gradients of the hidden states are summed in their cast copy's bfloat16."""
    if x.settings.context != "autocast":
        return Recipe()
    return Recipe(accumulate="bf16", partials=-(-len(x.weight) // _chunk(x)))


def _chunk(x: Inputs) -> int:
    """Vocabulary entries of a chunk: at most sixteen chunks."""
    return max(BLOCK, -(-len(x.weight) // 16))


def narrow(x: Inputs) -> Recipe:
    """Everything in the dtype of the head; under autocast in bf16, the softmax too unless CUDA takes it to float32."""
    dtype = plain.head_dtype(x)
    if x.settings.context == "autocast":
        softmax = "fp32" if x.hidden.is_cuda else "bf16"
        return Recipe(logits="bf16", dlogits="bf16", elementwise="bf16", softmax=softmax)
    return Recipe(logits=dtype, dlogits=dtype, elementwise=dtype, softmax=dtype, output=dtype)


def _adapter(x: Inputs, hidden: torch.Tensor, wide: bool) -> torch.Tensor | float:
    """What a LoRA adapter adds to the logits."""
    if getattr(x.settings, "head", "plain") != "lora":
        return 0.0
    a, b = (x.lora_a.float(), x.lora_b.float()) if wide else (x.lora_a, x.lora_b)
    return linear(linear(hidden, a), b)


def stored_logits(x: Inputs, hidden: torch.Tensor) -> torch.Tensor:
    """h Wᵀ + b in the dtype of the head, then float32."""
    hidden = plain.cast(x, hidden)
    return (linear(hidden, x.weight, x.bias) + _adapter(x, hidden, False)).float()


def wide_logits(x: Inputs) -> torch.Tensor:
    """h Wᵀ + b in float32."""
    hidden = plain.states(x).float()
    return (
        linear(hidden, x.weight.float(), None if x.bias is None else x.bias.float()) + _adapter(x, hidden, True)
    ).float()


def finished(x: Inputs, z: torch.Tensor, inverse: bool = False) -> torch.Tensor:
    """softcap(scale·z)/τ, or ·(1/τ)."""
    s = x.settings
    if s.logit_scale != 1.0:
        z = z * s.logit_scale
    if s.softcap is not None:
        z = torch.tanh(z * (1 / s.softcap)) * s.softcap if inverse else s.softcap * torch.tanh(z / s.softcap)
    return z * (1 / s.temperature) if inverse else z / s.temperature


def _index(ids: torch.Tensor) -> torch.Tensor:
    return ids.long().clamp(min=0).unsqueeze(-1)


def _kept(ids: torch.Tensor, logps: torch.Tensor, entropy: torch.Tensor) -> Pair:
    ignored = ids == IGNORE_INDEX
    return logps.masked_fill(ignored, 0.0), entropy.masked_fill(ignored, 0.0)


def by_softmax(ids: torch.Tensor, z: torch.Tensor) -> Pair:
    """log_softmax over the vocabulary, then a gather; entropy -Σ p log p."""
    logps = log_softmax(z, -1)
    finite = logps.masked_fill(logps == -torch.inf, 0.0)
    return _kept(
        ids, logps.gather(-1, _index(ids)).squeeze(-1), -(finite.exp() * (logps > -torch.inf) * finite).sum(-1)
    )


def by_logsumexp(ids: torch.Tensor, z: torch.Tensor) -> Pair:
    """z[id] - logsumexp(z); entropy logsumexp(z) - Σ p z, about the largest logit."""
    z = z - z.amax(-1, keepdim=True).detach()
    lse = torch.logsumexp(z, -1)
    p = (z - lse.unsqueeze(-1)).exp()
    entropy = lse - (p * z.masked_fill(z == -torch.inf, 0.0)).sum(-1)
    return _kept(ids, z.gather(-1, _index(ids)).squeeze(-1) - lse, entropy)


class _Online(torch.autograd.Function):
    """Log-sum-exp and entropy in one pass over blocks of the vocabulary, with the gradient written by hand."""

    @staticmethod
    def forward(ctx: Any, z: torch.Tensor, index: torch.Tensor) -> Pair:
        top = z.new_full(z.shape[:-1], torch.finfo(z.dtype).min)
        total, moment = torch.zeros_like(top), torch.zeros_like(top)
        for block in z.split(max(BLOCK, -(-z.shape[-1] // 64)), -1):
            new = torch.maximum(top, block.amax(-1))
            shifted = block - new.unsqueeze(-1)
            weights, scale = shifted.exp(), (top - new).exp()
            moment = scale * moment + torch.where(total > 0, (top - new) * scale * total, 0.0)
            moment = moment + (weights * shifted.masked_fill(weights == 0, 0.0)).sum(-1)
            total, top = scale * total + weights.sum(-1), new
        logps = z.gather(-1, index).squeeze(-1) - top - total.log()
        entropy = total.log() - moment / total
        ctx.save_for_backward(z, index, top, total, entropy)
        return logps, entropy

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        z, index, top, total, entropy = ctx.saved_tensors
        logp = z - top.unsqueeze(-1) - total.log().unsqueeze(-1)
        p = logp.exp()
        surprise = torch.where(p > 0, p * (logp + entropy.unsqueeze(-1)), 0.0)
        g = -p * grads[0].unsqueeze(-1)
        g = g.scatter_add(-1, index, grads[0].unsqueeze(-1))
        return g - surprise * grads[1].unsqueeze(-1), None


def online(ids: torch.Tensor, z: torch.Tensor) -> Pair:
    """Online log-sum-exp, as fused kernels compute it."""
    logps, entropy = _Online.apply(z, _index(ids))
    return _kept(ids, logps, entropy)


def chunked(x: Inputs) -> Pair:
    """The head a few vocabulary entries at a time; log-sum-exp over the chunks' own."""
    hidden, weight = plain.states(x).float(), x.weight.float()
    bias = x.weight.new_zeros(len(weight)).float() if x.bias is None else x.bias.float()
    extra = _adapter(x, hidden, True)
    parts = []
    for start in range(0, len(weight), _chunk(x)):
        rows = slice(start, start + _chunk(x))
        z = linear(hidden, weight[rows], bias[rows]) + (extra[..., rows] if isinstance(extra, torch.Tensor) else 0.0)
        parts.append(finished(x, z.float()))
    top = torch.stack([p.amax(-1) for p in parts]).amax(0).detach().unsqueeze(-1)
    total = torch.stack([(p - top).exp().sum(-1) for p in parts]).sum(0)
    lse = total.log().unsqueeze(-1)
    logs = [p - top - lse for p in parts]
    entropy = -torch.stack([(q.exp() * q.masked_fill(q == -torch.inf, 0.0)).sum(-1) for q in logs]).sum(0)
    return _kept(x.ids, torch.cat(logs, -1).gather(-1, _index(x.ids)).squeeze(-1), entropy)


def tiles(x: Inputs) -> Pair:
    """A few tokens at a time: logits in the dtype of the head, in which autograd sums its partial gradients."""
    hidden, ids = plain.states(x).flatten(0, 1), x.ids.flatten()
    pairs = [
        by_softmax(i, finished(x, stored_logits(x, h)))
        for h, i in zip(hidden.split(TILE), ids.split(TILE), strict=True)
    ]
    logps, entropy = (torch.cat(part).view(x.ids.shape) for part in zip(*pairs, strict=True))
    return logps, entropy


def permuted(x: Inputs) -> Pair:
    """Vocabulary and contraction in another order."""
    generator = torch.Generator().manual_seed(x.case.seed)
    rows, columns = (
        torch.randperm(x.weight.shape[0], generator=generator).to(x.device),
        torch.randperm(x.weight.shape[1], generator=generator).to(x.device),
    )
    weight = x.weight.float()[rows][:, columns]
    hidden = plain.states(x).float()
    z = linear(hidden[..., columns], weight, None if x.bias is None else x.bias.float()[rows])
    extra = _adapter(x, hidden, True)
    z = finished(x, (z + (extra[..., rows] if isinstance(extra, torch.Tensor) else 0.0)).float())
    ids = torch.where(x.ids == IGNORE_INDEX, IGNORE_INDEX, rows.argsort()[x.ids.long().clamp(min=0)])
    return by_softmax(ids, z)


def by_narrow(x: Inputs) -> Pair:
    """Everything in the dtype of the head."""
    in_range = x.weight.dtype != torch.float16 or len(x.weight) < 65504
    require(in_range, "torch sums the exponentials of a float16 softmax in float16 on the CPU")
    hidden = plain.cast(x, plain.states(x))
    z = linear(hidden, x.weight, x.bias) + _adapter(x, hidden, False)
    return by_softmax(x.ids, finished(x, z))


HEADS = {
    "plain": Head(lambda x: by_softmax(x.ids, finished(x, stored_logits(x, plain.states(x)))), stored),
    "reordered": Head(lambda x: by_logsumexp(x.ids, finished(x, wide_logits(x))), ieee),
    "inverse": Head(lambda x: by_softmax(x.ids, finished(x, wide_logits(x), inverse=True)), ieee),
    "online": Head(lambda x: online(x.ids, finished(x, wide_logits(x))), ieee),
    "chunked": Head(chunked, split),
    "tiles": Head(tiles, tiled),
    "permuted": Head(permuted, ieee),
    "narrow": Head(by_narrow, narrow),
}
