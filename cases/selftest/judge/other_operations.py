"""More operations with right implementations in several styles: none of them was used to make the judge's rules."""

import torch
import torch.nn.functional as F

from cases.selftest.judge.operations import LOG_PROBS, Operation, ids_with_ignored, widened
from parity.testing import definitions as D
from parity.testing import draw, index, stored, tensor

ROWS = {"x": tensor("N", "H")}
TOKENS = {"x": tensor("B", "T", "H"), "weight": tensor("H", around=1)}
MANY = {"B": (1, 5), "T": (1, 129), "H": (1, 129)}
HEADS = {n: tensor("B", 2, "T", "D") for n in ("q", "k", "v")}
SMALL = {"B": 2, "T": 33, "D": 65}


def wide(function):
    """In float32, rounded at the end."""
    return widened(function)


def tiled_sum(x, dim=-1, size=16):
    """Over tiles in turn, as a kernel's loop does."""
    total = 0
    for part in x.split(size, dim):
        total = total + part.sum(dim, keepdim=True)
    return total


def online_lse(x, size=16):
    m, total = x[..., :1].detach() * 0 - torch.inf, 0 * x[..., :1]
    for part in x.split(size, -1):
        new = torch.maximum(m, part.detach().amax(-1, keepdim=True))
        total = total * (m - new).exp() + (part - new).exp().sum(-1, keepdim=True)
        m = new
    return m + total.log()


def tiled_product(x, w, size=16):
    total = 0
    for a, b in zip(x.split(size, -1), w.split(size, -1), strict=True):
        total = total + a @ b.mT
    return total


def log_softmax(x):
    return torch.log_softmax(x, -1)


def entropy(x):
    logps = torch.log_softmax(x, -1)
    return -(logps.exp() * logps).sum(-1)


def normalise(x):
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-12)


def cosine(x, y):
    return (x * y).sum(-1) * torch.rsqrt(x.square().sum(-1) + 1e-6) * torch.rsqrt(y.square().sum(-1) + 1e-6)


def linear(x, weight, bias):
    return x @ weight.mT + bias


def bias_first(x, weight, bias):
    """Its bias is one more term of the sum: `addmm` begins with it."""
    return torch.cat([x, torch.ones_like(x[:, :1])], -1) @ torch.cat([weight, bias[:, None]], -1).mT


vars(linear)["also"] = (bias_first,)


def lora(x, weight, a, b):
    return x @ weight.mT + 2.0 * ((x @ a.mT) @ b.mT)


def batch_norm(x, weight, bias):
    centred = x - x.mean(0)
    return centred * torch.rsqrt(centred.square().mean(0) + 1e-5) * weight + bias


def batch_norm_spread(x, weight, bias):
    r = torch.rsqrt((x * (x - x.mean(0))).mean(0) + 1e-5)
    return (x * r - x.mean(0) * r) * weight + bias


def batch_norm_folded(x, weight, bias):
    """As torch's CPU kernel: x·α + (b - mean·α)."""
    mean = x.mean(0)
    alpha = torch.rsqrt((x - mean).square().mean(0) + 1e-5) * weight
    return x * alpha + (bias - mean * alpha)


vars(batch_norm)["also"] = (batch_norm_spread, batch_norm_folded)


def gelu(x):
    return 0.5 * x * (1 + torch.erf(x * 0.5**0.5))


def softcap(x):
    return 30.0 * torch.tanh(x / 30.0)


def huber(x, y):
    d = (x - y).abs()
    return torch.where(d < 1, 0.5 * d * d, d - 0.5).mean()


def dpo(chosen, rejected):
    return -F.logsigmoid(0.1 * (chosen - rejected)).mean()


def bce(x, y):
    return F.softplus(x) - x * y


def bce_of_torch(x, y):
    return (1 - y) * x - F.logsigmoid(x)


vars(bce)["also"] = (bce_of_torch,)


def scan(a, x):
    """h = a·h + x along T."""
    h, out = 0, []
    for gate, value in zip(torch.sigmoid(a).unbind(1), x.unbind(1), strict=True):
        h = gate * h + value
        out.append(h)
    return torch.stack(out, 1)


class Scan(torch.autograd.Function):
    """With a backward written out."""

    @staticmethod
    def forward(ctx, a, x):
        out = scan(a, x)
        ctx.save_for_backward(a, out)
        return out

    @staticmethod
    def backward(ctx, g):
        a, out = ctx.saved_tensors
        gate, d, dx = torch.sigmoid(a), 0, []
        for t in reversed(range(g.shape[1])):
            d = g[:, t] + (gate[:, t + 1] * d if t + 1 < g.shape[1] else 0)
            dx.insert(0, d)
        dx = torch.stack(dx, 1)
        before = torch.cat([torch.zeros_like(out[:, :1]), out[:, :-1]], 1)
        return dx * before * gate * (1 - gate), dx


def causal_conv(x, weight):
    """Depthwise over T, four taps."""
    padded = F.pad(x, (3, 0))
    return sum(padded[..., i : i + x.shape[-1]] * weight[:, i : i + 1] for i in range(4))


def with_sink(q, k, sink):
    scores = q @ k.mT * q.shape[-1] ** -0.5
    return torch.cat([scores, sink.view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)], -1)


def attention_with_sink(q, k, v, sink):
    """One more logit a head, to nothing (gpt-oss)."""
    return stored(torch.softmax(with_sink(q, k, sink), -1)[..., :-1]) @ v


def with_window(q, k, window):
    scores = q @ k.mT * q.shape[-1] ** -0.5
    near = torch.arange(q.shape[2])[:, None] - torch.arange(q.shape[2])
    return scores.masked_fill((near < 0) | (near >= window), -torch.inf)


def attention_with_window(q, k, v, window):
    return stored(torch.softmax(with_window(q, k, window), -1)) @ v


vars(attention_with_sink)["also"] = (
    lambda q, k, v, sink: D.made_again(lambda: with_sink(q, k, sink), F.pad(v, (0, 0, 0, 1))),
)
vars(attention_with_window)["also"] = (lambda q, k, v, window: D.made_again(lambda: with_window(q, k, window), v),)


def window_by_torch(q, k, v, window):
    near = torch.arange(q.shape[2])[:, None] - torch.arange(q.shape[2])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=(near >= 0) & (near < window))


def sink_by_hand(q, k, v, sink):
    scores = q @ k.mT * q.shape[-1] ** -0.5
    lse = torch.logaddexp(scores.logsumexp(-1, keepdim=True), sink.view(1, -1, 1, 1))
    return (scores - lse).exp() @ v


def dyt(x, alpha, weight, bias):
    return torch.tanh(alpha * x) * weight + bias


def relu_squared(x):
    return x.relu().square()


def add_rms_norm(x, residual, weight):
    total = stored(x + residual)
    return D.rms_norm(total, weight), total


def modulated(x, scale, shift):
    centred = x - x.mean(-1, keepdim=True)
    normal = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + 1e-6)
    return normal * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


def token_layer_norm(x, weight):
    return D.layer_norm(x, weight, torch.zeros_like(weight))


vars(token_layer_norm)["also"] = (lambda x, weight: D.layer_norm_spread(x, weight, torch.zeros_like(weight)),)
vars(modulated)["also"] = (
    lambda x, scale, shift: D.layer_norm_spread(x, 1 + scale.unsqueeze(1), shift.unsqueeze(1), 1e-6),
)


def interleaved_rope(x, angle):
    even, odd = x[..., ::2], x[..., 1::2]
    c, s = angle.cos(), angle.sin()
    return torch.stack([even * c - odd * s, even * s + odd * c], -1).flatten(-2)


def complex_rope(x, angle):
    turned = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)).contiguous()) * torch.polar(
        torch.ones_like(angle.float()), angle.float()
    )
    return torch.view_as_real(turned).flatten(-2).to(x.dtype)


def experts(x, up, down, ids):
    """Each token by its own expert."""
    return (stored(F.silu((x.unsqueeze(1) @ up[ids]).squeeze(1))).unsqueeze(1) @ down[ids]).squeeze(1)


def experts_in_groups(x, up, down, ids):
    out = torch.zeros(x.shape[0], down.shape[-1], dtype=x.dtype)
    for e in range(up.shape[0]):
        at = (ids == e).nonzero()[:, 0]
        out = out.index_add(0, at, F.silu(x[at] @ up[e]) @ down[e])
    return out


def balance(x):
    """E·Σ fᵢ·Pᵢ with soft f: the auxiliary loss of a router."""
    p = torch.softmax(x, -1)
    return x.shape[-1] * (p.mean(0) * p.mean(0)).sum()


def selected(x, target):
    kept = target.clamp(min=0)
    return torch.log_softmax(x, -1).gather(-1, kept[:, None])[:, 0]


def masked_mean(x, mask):
    return (x * mask).sum() / mask.sum().clamp(min=1)


def info_nce(x, y):
    return torch.logsumexp(s := x @ y.mT / x.shape[-1] ** 0.5, -1).mean() - s.diagonal().mean()


def distance(x, y):
    return (x.unsqueeze(1) - y.unsqueeze(0)).square().sum(-1)


OTHERS = {
    "log_softmax": Operation(
        draw(**ROWS),
        log_softmax,
        {
            "torch": wide(lambda x: F.log_softmax(x, -1)),
            "online": wide(lambda x: x - online_lse(x)),
            "by lse": wide(lambda x: x - x.logsumexp(-1, keepdim=True)),
        },
    ),
    "entropy": Operation(
        draw(x=tensor("N", "H", scale=2), sizes={"H": 1025}),
        entropy,
        {"lse": wide(lambda x: (z := x - x.detach().amax(-1, True)).logsumexp(-1) - (z.softmax(-1) * z).sum(-1))},
    ),
    "normalise": Operation(
        draw(**ROWS),
        normalise,
        {
            "torch": wide(lambda x: x / (x.square().sum(-1, keepdim=True) + 1e-12).sqrt()),
            "tiles": wide(lambda x: x * torch.rsqrt(tiled_sum(x * x) + 1e-12)),
        },
    ),
    "cosine": Operation(
        draw(x=tensor("N", "H"), y=tensor("N", "H")),
        cosine,
        {
            "tiles": wide(
                lambda x, y: (
                    tiled_sum(x * y) / ((tiled_sum(x * x) + 1e-6).sqrt() * (tiled_sum(y * y) + 1e-6).sqrt())
                ).squeeze(-1)
            )
        },
    ),
    "linear": Operation(
        draw(x=tensor("N", "K"), weight=tensor("M", "K", scale=0.2), bias=tensor("M"), sizes={"K": 513, "M": 33}),
        linear,
        {
            "addmm": wide(lambda x, weight, bias: F.linear(x, weight, bias)),
            "tiles": wide(lambda x, weight, bias: tiled_product(x, weight) + bias),
            "bias first": wide(lambda x, weight, bias: bias.expand(x.shape[0], -1) + x @ weight.mT),
        },
    ),
    "lora": Operation(
        draw(
            x=tensor("N", "K"),
            weight=tensor("M", "K", scale=0.2),
            a=tensor(4, "K", scale=0.2),
            b=tensor("M", 4, scale=0.2),
            sizes={"K": 257, "M": 33},
        ),
        lora,
        {"merged": wide(lambda x, weight, a, b: x @ weight.mT + x @ a.mT @ (2.0 * b).mT)},
    ),
    "batch_norm": Operation(
        draw(x=tensor("N", "C"), weight=tensor("C", around=1), bias=tensor("C"), sizes={"N": (2, 257), "C": 65}),
        batch_norm,
        {
            "torch": wide(lambda x, weight, bias: F.batch_norm(x, None, None, weight, bias, training=True)),
            "tiles": wide(
                lambda x, weight, bias: (
                    (c := x - tiled_sum(x, 0) / x.shape[0])
                    * torch.rsqrt(tiled_sum(c * c, 0) / x.shape[0] + 1e-5)
                    * weight
                    + bias
                )
            ),
        },
    ),
    "gelu": Operation(
        draw(**ROWS),
        gelu,
        {
            "erfc": wide(lambda x: 0.5 * x * torch.erfc(-x * 0.5**0.5)),
            "normal": wide(lambda x: x * torch.special.ndtr(x)),
        },
    ),
    "softcap": Operation(
        draw(x=tensor("N", "H", scale=10)),
        softcap,
        {"half the angle": wide(lambda x: 60.0 * (t := torch.tanh(x / 60.0)) / (1 + t * t))},
    ),
    "huber": Operation(
        draw(x=tensor("N", "H"), y=tensor("N", "H")), huber, {"torch": wide(lambda x, y: F.smooth_l1_loss(x, y))}
    ),
    "dpo": Operation(
        draw(chosen=tensor("N", scale=20), rejected=tensor("N", scale=20), sizes={"N": (1, 513)}),
        dpo,
        {"softplus": wide(lambda chosen, rejected: F.softplus(-0.1 * (chosen - rejected)).mean())},
    ),
    "bce": Operation(
        draw(x=tensor("N", "H", scale=3), y=tensor("N", "H", then=torch.sigmoid)),
        bce,
        {
            "torch": wide(lambda x, y: F.binary_cross_entropy_with_logits(x, y, reduction="none")),
        },
    ),
    "scan": Operation(
        draw(a=tensor("B", "T", "H"), x=tensor("B", "T", "H"), sizes={"B": (1, 3), "T": (1, 24), "H": 33}),
        scan,
        {"by hand": wide(Scan.apply)},
    ),
    "causal_conv": Operation(
        draw(x=tensor("B", "C", "T"), weight=tensor("C", 4), sizes={"B": (1, 5), "C": 17, "T": 257}),
        causal_conv,
        {"torch": wide(lambda x, weight: F.conv1d(F.pad(x, (3, 0)), weight.unsqueeze(1), groups=weight.shape[0]))},
    ),
    "sink": Operation(draw(**HEADS, sink=tensor(2), sizes=SMALL), attention_with_sink, {"by lse": wide(sink_by_hand)}),
    "window": Operation(
        draw(**HEADS, window=[3, 16], sizes=SMALL), attention_with_window, {"torch": wide(window_by_torch)}
    ),
    "dyt": Operation(
        draw(
            x=tensor("N", "H"), alpha=tensor(1, around=0.5, scale=0.1), weight=tensor("H", around=1), bias=tensor("H")
        ),
        dyt,
        {"sigmoid": wide(lambda x, alpha, weight, bias: torch.addcmul(bias, torch.tanh(x * alpha), weight))},
    ),
    "relu_squared": Operation(draw(**ROWS), relu_squared, {"product": wide(lambda x: x * x.clamp(min=0))}),
    "add_rms_norm": Operation(
        draw(x=tensor("N", "H"), residual=tensor("N", "H"), weight=tensor("H", around=1)),
        add_rms_norm,
        {
            "kept": wide(
                lambda x, residual, weight: (F.rms_norm(x + residual, weight.shape, weight, 1e-6), x + residual)
            ),
        },
    ),
    "modulated": Operation(
        draw(x=tensor("B", "T", "H"), scale=tensor("B", "H", scale=0.1), shift=tensor("B", "H"), sizes=MANY),
        modulated,
        {
            "torch": wide(
                lambda x, scale, shift: torch.addcmul(
                    shift.unsqueeze(1), F.layer_norm(x, x.shape[-1:], eps=1e-6), 1 + scale.unsqueeze(1)
                )
            )
        },
    ),
    "token_layer_norm": Operation(
        draw(**TOKENS, sizes=MANY),
        token_layer_norm,
        {"torch": wide(lambda x, weight: F.layer_norm(x, weight.shape, weight, torch.zeros_like(weight)))},
    ),
    "token_rms_norm": Operation(
        draw(**TOKENS, sizes=MANY),
        D.rms_norm,
        {
            "torch": wide(lambda x, weight: F.rms_norm(x, weight.shape, weight, 1e-6)),
            "one by one": wide(lambda x, weight: torch.stack([D.rms_norm(row, weight) for row in x.unbind(1)], 1)),
        },
    ),
    "interleaved_rope": Operation(
        draw(x=tensor("B", "T", 32), angle=tensor("B", "T", 16), sizes={"B": (1, 3), "T": 129}),
        interleaved_rope,
        {},
    ),
    "experts": Operation(
        draw(
            x=tensor("N", "H"),
            up=tensor(4, "H", "F", scale=0.2),
            down=tensor(4, "F", "H", scale=0.2),
            ids=index("N", below=4),
            sizes={"H": 33, "F": 33},
        ),
        experts,
        {"groups": wide(experts_in_groups)},
    ),
    "balance": Operation(draw(x=tensor("N", "E"), sizes={"N": (1, 513), "E": 33}), balance, {}),
    "selected": Operation(
        draw(x=tensor("N", "V", scale=3), target=ids_with_ignored, sizes={"N": (1, 33), "V": 1025}),
        selected,
        {
            "lse": wide(lambda x, target: x.gather(-1, target.clamp(min=0)[:, None])[:, 0] - x.logsumexp(-1)),
            "online": wide(lambda x, target: x.gather(-1, target.clamp(min=0)[:, None])[:, 0] - online_lse(x)[:, 0]),
        },
    ),
    "masked_mean": Operation(
        draw(
            x=tensor("N", "T"),
            mask=tensor("N", "T", then=lambda x: (x > 0).double(), values=("plain", "zeros")),
            sizes={"T": 513},
        ),
        masked_mean,
        {"by rows": wide(lambda x, mask: sum(((x * mask).sum(-1)).unbind()) / mask.sum().clamp(min=1))},
    ),
    "info_nce": Operation(
        draw(x=tensor("N", "H"), y=tensor("N", "H"), sizes={"N": (1, 33), "H": 129}),
        info_nce,
        {"torch": wide(lambda x, y: F.cross_entropy(x @ y.mT / x.shape[-1] ** 0.5, torch.arange(len(x))))},
    ),
    "distance": Operation(
        draw(x=tensor("N", "H"), y=tensor("M", "H"), sizes={"N": (1, 33), "M": 17, "H": 65}),
        distance,
        {},
    ),
    "kl_of_logits": Operation(
        draw(x=tensor("N", "V", scale=2), log_p=tensor("N", "V", **LOG_PROBS), sizes={"N": (1, 33), "V": 1025}),
        lambda x, log_p: (log_p.exp() * (log_p - torch.log_softmax(x, -1))).sum(-1),
        {"lse": wide(lambda x, log_p: (log_p.exp() * (log_p - (x - x.logsumexp(-1, keepdim=True)))).sum(-1))},
    ),
}
