"""Controls of family `logprobs`: correct log-probs and entropies with other algorithms, each with its true recipe."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import linear, log_softmax

from parity.case.inputs import Inputs
from parity.families.head import IGNORE_INDEX
from parity.implementations import plain
from parity.implementations.implementation import Outputs
from parity.implementations.limits import require
from parity.judge.recipe import Recipe

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
    return Recipe(logits=dtype, dlogits=dtype, accumulate=x.autocast or dtype, partials=-(-x.ids.numel() // TILE))


def split(x: Inputs) -> Recipe:
    """float32; under autocast the chunks' gradients of the hidden states are summed in their cast copy's dtype."""
    if x.autocast is None:
        return Recipe()
    return Recipe(accumulate=x.autocast, partials=-(-len(x.weight) // _chunk(x)))


def _chunk(x: Inputs) -> int:
    """Vocabulary entries of a chunk: at most sixteen chunks."""
    return max(BLOCK, -(-len(x.weight) // 16))


def narrow(x: Inputs) -> Recipe:
    """Everything in the dtype of the head; under autocast in its dtype, the softmax too unless CUDA takes it to float32."""
    dtype = plain.head_dtype(x)
    if x.autocast:
        stored = dict.fromkeys(("logits", "dlogits", "elementwise"), x.autocast)
        return Recipe(**stored, softmax="fp32" if x.hidden.is_cuda else x.autocast)
    return Recipe(logits=dtype, dlogits=dtype, elementwise=dtype, softmax=dtype, output=dtype)


def gathered(x: Inputs) -> Recipe:
    """As `narrow`, with a log-sum-exp stored so; under autocast in its dtype on CUDA too."""
    found = narrow(x)
    return dataclasses.replace(found, log_sum_exp=x.autocast or plain.head_dtype(x))


def narrow_product(x: Inputs, hidden: torch.Tensor) -> torch.Tensor:
    """`product` in the dtype of the head."""
    hidden = plain.cast(x, hidden)
    z = linear(hidden, x.weight, x.bias)
    return z if not _has_adapter(x) else z + linear(linear(hidden, x.lora_a), x.lora_b)


def stored_product(x: Inputs, hidden: torch.Tensor) -> torch.Tensor:
    """`narrow_product`, then float32."""
    return narrow_product(x, hidden).float()


def _has_adapter(x: Inputs) -> bool:
    return getattr(x.settings, "head", "plain") == "lora"


def product(x: Inputs, hidden: torch.Tensor) -> torch.Tensor:
    """h Wᵀ + b and a LoRA adapter's share, in float32."""
    z = linear(hidden, x.weight.float(), None if x.bias is None else x.bias.float())
    if _has_adapter(x):
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


def within(x: Inputs, z: torch.Tensor) -> torch.Tensor:
    """`finish` with the division in float32, as a kernel has it that takes logits and a temperature."""
    return cooled(x, capped(x, scaled(x, z)).float())


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
        return offered(self.head)(x)


def offered(head: Callable[[Inputs], Pair]) -> Callable[[Inputs], Outputs]:
    """A head as an adapter of family `logprobs`."""

    def call(x: Inputs) -> Outputs:
        logps, entropy = head(x)
        return {"logps": logps} | ({"entropy": entropy} if x.settings.entropy != "none" else {})

    return call


def inverted(x: Inputs, z: torch.Tensor) -> torch.Tensor:
    """`finish` with products by 1/c and 1/τ."""
    z, c = scaled(x, z), x.settings.softcap
    return (z if c is None else torch.tanh(z * (1 / c)) * c) * (1 / x.settings.temperature)


def by_softmax(x: Inputs, z: torch.Tensor) -> Pair:
    """log_softmax over the vocabulary, then a gather; entropy -Σ p log p."""
    return of_log_probs(x, log_softmax(z, -1))


def of_log_probs(x: Inputs, logps: torch.Tensor, dim: int = -1) -> Pair:
    """A gather along the vocabulary, and -Σ p log p."""
    finite = logps.masked_fill(logps == -torch.inf, 0.0)
    chosen = logps.gather(dim, targets(x).unsqueeze(dim)).squeeze(dim)
    return chosen, -(finite.exp() * (logps > -torch.inf) * finite).sum(dim)


def along_rows(x: Inputs, z: torch.Tensor) -> Pair:
    """As `by_softmax`, along the first dimension, as `cross_entropy(z.transpose(1, 2), ids)` takes it: added in turn."""
    return of_log_probs(x, log_softmax(z.movedim(-1, 0).contiguous(), 0), 0)


def by_log_sum_exp(x: Inputs, z: torch.Tensor) -> Pair:
    """z[id] - logsumexp(z), with the log-sum-exp stored in the dtype of the logits; entropy from the same log-probs."""
    return of_log_probs(x, z - z.logsumexp(-1, keepdim=True))


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


def online(x: Inputs, z: torch.Tensor) -> Pair:
    """Online log-sum-exp, as fused kernels compute it."""
    logps, entropy = _Online.apply(z, targets(x).unsqueeze(-1))
    return logps, entropy


def rescaled(x: Inputs, z: torch.Tensor) -> Pair:
    """The same by autograd, through the maximum too, which cancels; half of the cases in one block."""
    top = z.detach().masked_fill(z == -torch.inf, torch.inf).amin(-1)
    total, moment = torch.zeros_like(top), torch.zeros_like(top)
    for block in z.split(z.shape[-1] if x.case.seed % 2 else max(BLOCK, -(-z.shape[-1] // 16)), -1):
        new = torch.maximum(top, block.amax(-1))
        shifted = block - new.unsqueeze(-1)
        weights, scale = shifted.exp(), (top - new).exp()
        moment = scale * (moment + (top - new) * total) + (weights * shifted.masked_fill(weights == 0, 0.0)).sum(-1)
        total, top = scale * total + weights.sum(-1), new
    return z.gather(-1, targets(x).unsqueeze(-1)).squeeze(-1) - (top + total.log()), total.log() - moment / total


def chunked(x: Inputs) -> Pair:
    """The head a few vocabulary entries at a time; log-sum-exp over the chunks' own."""
    hidden, weight = plain.states(x).float(), x.weight.float()
    bias = x.weight.new_zeros(len(weight)).float() if x.bias is None else x.bias.float()
    extra = linear(linear(hidden, x.lora_a.float()), x.lora_b.float()) if _has_adapter(x) else None
    parts = []
    for start in range(0, len(weight), _chunk(x)):
        rows = slice(start, start + _chunk(x))
        z = linear(hidden, weight[rows], bias[rows]) + (0.0 if extra is None else extra[..., rows])
        parts.append(finish(x, z.float()))
    top = torch.stack([p.amax(-1) for p in parts]).amax(0).detach().unsqueeze(-1)
    total = torch.stack([(p - top).exp().sum(-1) for p in parts]).sum(0)
    lse = total.log().unsqueeze(-1)
    logs = [p - top - lse for p in parts]
    entropy = -torch.stack([(q.exp() * q.masked_fill(q == -torch.inf, 0.0)).sum(-1) for q in logs]).sum(0)
    logps = torch.cat(logs, -1).gather(-1, targets(x).unsqueeze(-1)).squeeze(-1)
    return kept(x, logps), kept(x, entropy)


def tiles(x: Inputs) -> Pair:
    """A few tokens at a time: logits in the dtype of the head, in which autograd sums its partial gradients."""
    hidden, ids = plain.states(x).flatten(0, 1), x.ids.flatten()
    pairs = [
        by_softmax(x.replace(ids=i), finish(x, stored_product(x, h)))
        for h, i in zip(hidden.split(TILE), ids.split(TILE), strict=True)
    ]
    logps, entropy = (kept(x, torch.cat(part).view(x.ids.shape)) for part in zip(*pairs, strict=True))
    return logps, entropy


def permuted(x: Inputs) -> Pair:
    """Vocabulary and contraction in another order."""
    generator = torch.Generator().manual_seed(x.case.seed)
    rows, columns = (torch.randperm(n, generator=generator).to(x.device) for n in x.weight.shape)
    read = x.replace(
        weight=x.weight.float()[rows][:, columns],
        bias=None if x.bias is None else x.bias.float()[rows],
        ids=torch.where(x.ids == IGNORE_INDEX, IGNORE_INDEX, rows.argsort()[targets(x)]),
    )
    if _has_adapter(x):
        read = read.replace(lora_a=x.lora_a.float()[:, columns], lora_b=x.lora_b.float()[rows])
    z = product(read, plain.states(x).float()[..., columns])
    logps, entropy = by_softmax(read, finish(x, z))
    return kept(x, logps), kept(x, entropy)


def _wide(x: Inputs) -> tuple[Inputs, torch.Tensor]:
    """The inputs with float32 parameters, each cast once, and the hidden states."""
    hidden = plain.states(x).float()
    parameters = {n: t.float() for n, t in x.tensors.items() if n in x.parameters and t is not None}
    return x.replace(**parameters), hidden


def _in_float32(head: Callable[[Inputs], Pair]) -> Callable[[Inputs], Pair]:
    """The head without the autocast of its device."""

    def call(x: Inputs) -> Pair:
        with torch.autocast(x.hidden.device.type, enabled=False):
            return head(x)

    return call


@_in_float32
def again(x: Inputs) -> Pair:
    """z[id] - L, whose backward makes its probabilities exp(z' - L) from L as stored and from z' of a product by halves."""
    half = x.weight.shape[-1] // 2
    x, hidden = _wide(x)
    z = finish(x, product(x, hidden))
    if _has_adapter(x) or not half:
        other = z
    else:
        first, second = x.replace(bias=None, weight=x.weight[:, :half]), x.replace(weight=x.weight[:, half:])
        other = finish(x, product(first, hidden[..., :half]) + product(second, hidden[..., half:]))
    lse = torch.logsumexp(z, -1).detach()
    p = (other - lse.unsqueeze(-1)).exp().detach()
    along = (p * z.masked_fill(p == 0, 0.0)).sum(-1)
    chosen = z.gather(-1, targets(x).unsqueeze(-1)).squeeze(-1)
    logps = chosen - lse - (along - along.detach())
    return kept(x, logps), kept(x, pair(x, z)[1])


@_in_float32
def apart(x: Inputs) -> Pair:
    """The target's logit as a sum of products of its own, beside the log-sum-exp of a matrix product."""
    weak = "the targets' rows of the head are summed by index: weak, as torch-linear-cross-entropy-confident is"
    require(x.ids.numel() < 2048 or "weight" not in x.leaves, weak)
    x, hidden = _wide(x)
    z = product(x, hidden)
    index = targets(x)
    if not _has_adapter(x):
        own = (hidden * x.weight[index]).sum(-1)
        own = own if x.bias is None else own + x.bias[index]
    else:
        own = z.gather(-1, index.unsqueeze(-1)).squeeze(-1)
    logps = finish(x, own) - torch.logsumexp(finish(x, z), -1)
    return kept(x, logps), kept(x, pair(x, finish(x, z))[1])


def _in_range(x: Inputs, z: torch.Tensor) -> torch.Tensor:
    fits = x.weight.dtype != torch.float16 or len(x.weight) < 65504
    require(fits, "torch sums the exponentials of a float16 softmax in float16 on the CPU")
    return finish(x, z)


ALL_NARROW = Steps(states=plain.states, product=narrow_product, finish=_in_range)

HEADS = {
    "plain": Head(Steps(states=plain.states, product=stored_product, pair=by_softmax).head, stored),
    "reordered": Head(Steps().head, ieee),
    "inverse": Head(Steps(finish=inverted, pair=by_softmax).head, ieee),
    "online": Head(Steps(pair=online).head, ieee),
    "rescaled": Head(Steps(pair=rescaled).head, ieee),
    "chunked": Head(chunked, split),
    "tiles": Head(tiles, tiled),
    "permuted": Head(permuted, ieee),
    "again": Head(again, ieee),
    "apart": Head(apart, ieee),
    "along rows": Head(Steps(pair=along_rows).head, ieee),
    "within": Head(
        Steps(states=plain.states, product=narrow_product, finish=within, pair=by_softmax).head, plain.stored
    ),
    "narrow": Head(dataclasses.replace(ALL_NARROW, pair=by_softmax).head, narrow),
    "gathered": Head(dataclasses.replace(ALL_NARROW, pair=by_log_sum_exp).head, gathered),
}
NARROW = frozenset({"narrow", "gathered"})
"""Those whose log-probs are stored in the dtype of the head."""
