"""Operations of language models: a description of inputs, a definition, and right implementations in several styles."""

import dataclasses
import functools

import torch
import torch.nn.functional as F

from parity.testing import Recipe, draw, index, tensor
from parity.testing import definitions as D

LOG_PROBS = {"then": lambda x: x.log_softmax(-1)}
PROBS = {"then": lambda x: x.softmax(-1)}


@dataclasses.dataclass(frozen=True)
class Operation:
    """`styles`: name -> function; "wide" is the definition on float32 inputs, rounded at the end."""

    drawn: object
    definition: object
    styles: dict = dataclasses.field(default_factory=dict)

    def all_styles(self):
        """Those of "fp32" are right in float32 alone: torch's own CPU code that adds up in 16 bits."""
        return {"wide": widened(self.definition), "exact": widened(self.definition, torch.float64), **self.styles}


def widened(function, dtype=torch.float32):
    """The function on inputs cast to `dtype`, its results in the dtype of the first."""

    def call(**given):
        narrow = next(x.dtype for x in given.values() if isinstance(x, torch.Tensor) and x.is_floating_point())
        wide = {
            n: x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x for n, x in given.items()
        }
        out = function(**wide)
        back = lambda o: o.to(narrow) if o.is_floating_point() else o  # noqa: E731
        return tuple(map(back, out)) if isinstance(out, tuple) else back(out)

    return call


class RMSNorm(torch.autograd.Function):
    """With 1/√(…) kept for a backward written out."""

    @staticmethod
    def forward(ctx, x, w, eps):
        wide = x.float()
        rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, w, rstd)
        return (wide * rstd * w.float()).to(x.dtype)

    @staticmethod
    def backward(ctx, g):
        x, w, rstd = ctx.saved_tensors
        wide, g = x.float(), g.float()
        n, gw = wide * rstd, g * w.float()
        dx = rstd * (gw - n * (gw * n).mean(-1, keepdim=True))
        return dx.to(x.dtype), (g * n).flatten(0, -2).sum(0).to(w.dtype), None


class CrossEntropy(torch.autograd.Function):
    """Softmax less one at the target, from the stored log-sum-exp."""

    @staticmethod
    def forward(ctx, logits, target):
        z, kept = logits.float(), target != -100
        lse = z.logsumexp(-1)
        chosen = z.gather(-1, target.clamp(min=0)[:, None])[:, 0]
        ctx.save_for_backward(logits, target, lse, kept.sum())
        return torch.where(kept, lse - chosen, 0.0).sum() / kept.sum()

    @staticmethod
    def backward(ctx, g):
        logits, target, lse, count = ctx.saved_tensors
        kept = target != -100
        p = (logits.float() - lse[:, None]).exp()
        p = p.scatter_add(-1, target.clamp(min=0)[:, None], torch.full_like(p[:, :1], -1.0))
        return (torch.where(kept[:, None], p, 0.0) * (g / count)).to(logits.dtype), None


def chunked_cross_entropy(hidden, weight, target, **options):
    """Rows in chunks of three, each with its own logits; float32 sums of the gradients."""
    kept, wide = (target != -100).sum(), weight.float()
    parts = [
        D.linear_cross_entropy(h, wide, t, reduction="sum", **options)
        for h, t in zip(hidden.float().split(3), target.split(3), strict=True)
    ]
    return (sum(parts) / kept).to(hidden.dtype)


def online_attention(q, k, v, causal=False):
    """Softmax over keys in blocks of four with a running maximum and sum."""
    repeats = q.shape[1] // k.shape[1]
    q, k, v = q.float(), k.float().repeat_interleave(repeats, 1), v.float().repeat_interleave(repeats, 1)
    m = q.new_full((*q.shape[:-1], 1), -torch.inf)
    total, out = torch.zeros_like(m), q.new_zeros(*q.shape[:-1], v.shape[-1])
    for start in range(0, k.shape[2], 4):
        s = q @ k[:, :, start : start + 4].mT * q.shape[-1] ** -0.5
        if causal:
            at = torch.arange(start, start + s.shape[-1], device=q.device)
            s = s.masked_fill(at[None] > torch.arange(q.shape[2], device=q.device)[:, None], -torch.inf)
        new = torch.maximum(m, s.amax(-1, keepdim=True).detach())
        new = torch.where(new == -torch.inf, 0.0, new)
        p = (s - new).exp()
        total = total * (m - new).exp() + p.sum(-1, keepdim=True)
        out = out * (m - new).exp() + p @ v[:, :, start : start + 4]
        m = new
    return out / total


def ids_with_ignored(case):
    from parity.judge.values import integers

    n, v = case.sizes["N"], case.sizes["V"]
    ids, some = integers(case.seed, "target", (n,), v), integers(case.seed, "ignored", (n,), 3)
    ids = torch.where(some == 0, -100, ids)
    ids[:1] = 0
    return ids.to(case.device)


NORM = {"x": tensor("N", "H"), "weight": tensor("H", around=1)}
HEADS = {
    "q": tensor("B", 4, "T", "D"),
    "k": tensor("B", 2, "T", "D", layouts=("contiguous", "sliced", "offset", "transposed", "odd")),
    "v": tensor("B", 2, "T", "D"),
    "causal": [False, True],
}
FEW = {"B": 2, "T": 33, "D": 65}
PACKED = {name: tensor(20, heads, "D") for name, heads in (("q", 4), ("k", 2), ("v", 2))}
PER_CHANNEL = {"weight": tensor(8, around=1), "bias": tensor(8)}
TURNED = {name: tensor("B", heads, "T", 20) for name, heads in (("q", 3), ("k", 1))}
TURNED |= {name: tensor("B", "T", 20, then=getattr(torch, name)) for name in ("cos", "sin")}
GATED = {name: tensor("N", "H") for name in ("gate", "up")}
TABLE = {"N": (1, 33), "V": 1025}
LABELLED = {"logits": tensor("N", "V", scale=3), "target": ids_with_ignored}
TWO = {name: tensor("N", "V", **LOG_PROBS) for name in ("log_q", "log_p")}
NARROW = Recipe(output="input", logits="input", dlogits="input")


def own_rms(x, weight, eps):
    return F.rms_norm(x, weight.shape, weight, eps)


def hand_rms(x, weight, eps):
    return RMSNorm.apply(x, weight, eps)


def router_of_logits(logits, normalised=True):
    """As a fused kernel: the softmax of the largest ones."""
    z = logits.float()
    top, experts = z.topk(3, -1)
    weights = torch.softmax(top, -1) if normalised else (top - torch.logsumexp(z, -1, keepdim=True)).exp()
    return weights.to(logits.dtype), experts


OPERATIONS = {
    "rms_norm": Operation(draw(**NORM, eps=[1e-6, 1e-5]), D.rms_norm, {"fp32 torch": own_rms, "by hand": hand_rms}),
    "gemma_rms_norm": Operation(
        draw(x=tensor("N", "H"), weight=tensor("H", scale=0.1), offset=[1.0]),
        D.rms_norm,
        {"by hand": lambda x, weight, offset: widened(own_rms)(x=x, weight=offset + weight.float(), eps=1e-6)},
    ),
    "layer_norm": Operation(
        draw(**NORM, bias=tensor("H")),
        D.layer_norm,
        {"fp32 torch": lambda x, weight, bias: F.layer_norm(x, weight.shape, weight, bias)},
    ),
    "group_norm": Operation(
        draw(x=tensor("N", 8, "H"), **PER_CHANNEL, groups=[1, 4, 8], sizes={"N": (1, 16), "H": (2, 65)}),
        D.group_norm,
        {"fp32 torch": lambda x, weight, bias, groups: F.group_norm(x, groups, weight, bias)},
    ),
    "rope": Operation(draw(**TURNED, sizes={"B": (1, 3), "T": 65}), D.rope),
    "swiglu": Operation(draw(**GATED), D.swiglu, {"kept": lambda gate, up: F.silu(gate) * up}),
    "geglu": Operation(draw(**GATED), D.geglu, {"kept": lambda gate, up: F.gelu(gate, approximate="tanh") * up}),
    "softmax": Operation(
        draw(x=tensor("N", "H")), D.softmax, {"torch": lambda x: F.softmax(x.float(), -1).to(x.dtype)}
    ),
    "cross_entropy": Operation(
        draw(**LABELLED, label_smoothing=[0.0, 0.1], z_loss=[0.0, 1e-3], softcap=[None, 10.0], sizes=TABLE),
        D.cross_entropy,
    ),
    "plain_cross_entropy": Operation(
        draw(**LABELLED, sizes=TABLE),
        D.cross_entropy,
        {
            "torch": lambda logits, target: F.cross_entropy(logits.float(), target),
            "by hand": lambda logits, target: CrossEntropy.apply(logits, target),
        },
    ),
    "linear_cross_entropy": Operation(
        draw(
            hidden=tensor("N", "H"),
            weight=tensor("V", "H", scale=0.2),
            target=ids_with_ignored,
            label_smoothing=[0.0, 0.1],
            sizes={"N": (1, 17), "H": 65, "V": 257},
        ),
        D.linear_cross_entropy,
        {"chunks": chunked_cross_entropy},
    ),
    "kl": Operation(
        draw(**TWO, sizes=TABLE),
        D.kl,
        {"torch": lambda log_q, log_p: F.kl_div(log_q.float(), log_p.float(), log_target=True, reduction="batchmean")},
    ),
    "jsd": Operation(draw(**TWO, beta=[0.5, 0.1], sizes=TABLE), D.jsd),
    "tvd": Operation(draw(p=tensor("N", "V", **PROBS), q=tensor("N", "V", **PROBS), sizes=TABLE), D.tvd),
    "attention": Operation(
        draw(**HEADS, sizes=FEW),
        D.attention,
        {
            "torch": lambda q, k, v, causal: F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True),
            "online": lambda q, k, v, causal: online_attention(q, k, v, causal).to(q.dtype),
        },
    ),
    "attention_of_lengths": Operation(
        draw(**PACKED, lengths=lambda case: [1, 12, 7], causal=[False, True], sizes={"D": 65}),
        D.attention_of_lengths,
    ),
    "embedding": Operation(
        draw(ids=index("N", below="V"), weight=tensor("V", "H"), sizes={"N": 2049, "H": 65}),
        D.embedding,
        {"fp32 torch": lambda ids, weight: F.embedding(ids, weight)},
    ),
    "top_k_router": Operation(
        draw(
            logits=tensor("T", 9, scale=2, values=("plain",), layouts=("contiguous", "sliced", "offset", "transposed")),
            normalised=[True, False],
        ),
        functools.partial(D.top_k_router, k=3),
        {"of logits": router_of_logits},
    ),
    "moe_combine": Operation(
        draw(outputs=tensor("T", 4, "H"), weights=tensor("T", 4, **PROBS)),
        D.moe_combine,
        {"product": lambda outputs, weights: (weights.float()[:, None] @ outputs.float())[:, 0].to(outputs.dtype)},
    ),
}
