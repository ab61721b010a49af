"""Definitions of operations of language models, in plain torch for any dtype; `stored` marks what kernels keep in 16 bits."""

import torch

from parity.judge.stages import stored


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6, offset: float = 0.0) -> torch.Tensor:
    """RMSNorm x/√(mean(x²) + eps)·(offset + w), x (…, H), w (H,): Zhang and Sennrich 2019; offset 1 in Gemma, 0 in Llama and T5.

    Llama and T5 (transformers' LlamaRMSNorm, T5LayerNorm) keep x/√(…) in the dtype of x before the product; Gemma does not.
    """
    normal = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return (stored(normal) if offset == 0.0 else normal) * (offset + weight)


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
    """LayerNorm (x - mean)/√(var + eps)·w + b over the last dimension, var the biased one: Ba, Kiros and Hinton 2016."""
    centred = x - x.mean(-1, keepdim=True)
    return centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps) * weight + bias


def layer_norm_spread(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
    """`layer_norm` as x·r - mean·r, r = 1/√(var + eps): torch's kernels subtract last, forward and backward."""
    return _spread(x, eps) * weight + bias


def _spread(x: torch.Tensor, eps: float) -> torch.Tensor:
    mean, var = x.mean(-1, keepdim=True), x.var(-1, correction=0, keepdim=True).detach()
    moved = ((x - x.detach()) * x.detach()).mean(-1, keepdim=True) - (mean - mean.detach()) * mean.detach()
    r = torch.rsqrt(var + 2 * moved + eps)  # `moved` is 0, its gradient (x - mean)/n as a difference
    return x * r - mean * r


def group_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, groups: int = 1, eps: float = 1e-5
) -> torch.Tensor:
    """GroupNorm: `layer_norm` over each of `groups` groups of channels and all positions; x (N, C, …): Wu and He 2018."""
    whole = x.unflatten(1, (groups, -1)).flatten(2)
    centred = whole - whole.mean(-1, keepdim=True)
    normal = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    return _by_channel(normal, x, weight, bias)


def group_norm_spread(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, groups: int = 1, eps: float = 1e-5
) -> torch.Tensor:
    """`group_norm` in the form of `layer_norm_spread`."""
    return _by_channel(_spread(x.unflatten(1, (groups, -1)).flatten(2), eps), x, weight, bias)


def _by_channel(normal: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    shape = (-1, *[1] * (x.dim() - 2))
    return normal.reshape(x.shape) * weight.view(shape) + bias.view(shape)


vars(layer_norm)["also"] = (layer_norm_spread,)
vars(group_norm)["also"] = (group_norm_spread,)


def rope(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotary embedding x·cos + rotate(x)·sin, rotate(x) = (-x₂, x₁) of the two halves; q, k (B, heads, T, D), cos, sin (B, T, D).

    Su et al. 2021 in the order of transformers' `apply_rotary_pos_emb`.
    """
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)

    def turned(x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat([-second, first], -1) * sin

    return turned(q), turned(k)


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """SwiGLU gate·σ(gate)·up: Shazeer 2020."""
    return stored(gate * torch.sigmoid(gate)) * up


def geglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """GEGLU gelu(gate)·up with GELU's tanh form ½x(1 + tanh(√(2/π)(x + 0.044715x³))): Shazeer 2020, Hendrycks and Gimpel 2016."""
    inner = (2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate * gate * gate)
    return stored(0.5 * gate * (1 + torch.tanh(inner))) * up


def softmax(x: torch.Tensor) -> torch.Tensor:
    """exp(x)/Σ exp(x) over the last dimension."""
    return torch.softmax(x, -1)


def cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: str = "mean",
) -> torch.Tensor:
    """Cross entropy (1 - s)·(L - z_y) + s·(L - mean z) + z_loss·L², L = log Σ exp z; logits (N, V), target (N,).

    z is softcap·tanh(logits/softcap) where there is a softcap (Gemma 2). Rows whose target is `ignore_index` count as 0, and not
    in the mean. Smoothing s as torch.nn.functional.cross_entropy has it, z_loss as in PaLM (Chowdhery et al. 2022).
    """
    z = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    kept = target != ignore_index
    logps = torch.log_softmax(z, -1)
    chosen = logps.gather(-1, torch.where(kept, target, 0).unsqueeze(-1)).squeeze(-1)
    loss = -(1 - label_smoothing) * chosen - label_smoothing * logps.mean(-1)
    if z_loss:
        loss = loss + z_loss * torch.logsumexp(z, -1).square()
    loss = torch.where(kept, loss, 0.0)
    return loss if reduction == "none" else loss.sum() / (kept.sum() if reduction == "mean" else 1)


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None = None,
    **options: object,
) -> torch.Tensor:
    """`cross_entropy` of the logits h·Wᵀ + b: hidden (N, H), weight (V, H), bias (V,)."""
    logits = stored(hidden @ weight.mT, "logits")
    return cross_entropy(logits if bias is None else logits + bias, target, **options)  # type: ignore[arg-type]


def kl(log_q: torch.Tensor, log_p: torch.Tensor) -> torch.Tensor:
    """KL(p ‖ q) = Σ p·(log p - log q), over all entries and divided by the rows (reduction "batchmean"); both (N, V)."""
    return (log_p.exp() * (log_p - log_q)).sum() / log_q.shape[0]


def jsd(log_q: torch.Tensor, log_p: torch.Tensor, beta: float = 0.5) -> torch.Tensor:
    """Generalised JSD β·KL(p ‖ m) + (1 - β)·KL(q ‖ m), m = β·p + (1 - β)·q, by rows: Agarwal et al. 2023."""
    shares = log_q.new_tensor([beta, 1 - beta]).log()
    log_m = torch.logaddexp(log_p + shares[0], log_q + shares[1])  # β·p + (1 - β)·q may underflow
    whole = beta * log_p.exp() * (log_p - log_m) + (1 - beta) * log_q.exp() * (log_q - log_m)
    return whole.sum() / log_q.shape[0]


def tvd(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Total variation distance ½Σ|p - q|, divided by the rows; both (N, V)."""
    return 0.5 * (p - q).abs().sum() / p.shape[0]


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False, scale: float | None = None
) -> torch.Tensor:
    """softmax(scale·q·kᵀ)·v, scale 1/√D unless given; q (B, heads, T, D), k and v (B, groups, S, D), heads a multiple of groups.

    Vaswani et al. 2017, grouped heads: Ainslie et al. 2023. Causal: position i of T sees the first i + 1 positions.
    """
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~seen, -torch.inf)
    return stored(torch.softmax(scores, -1)) @ v


def attention_of_lengths(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: list[int], causal: bool = False
) -> torch.Tensor:
    """`attention` of sequences that lie one after another: q, k, v (Σ lengths, heads, D)."""
    parts = [x.transpose(0, 1).unsqueeze(0).split(lengths, 2) for x in (q, k, v)]
    whole = torch.cat([attention(a, b, c, causal) for a, b, c in zip(*parts, strict=True)], 2)
    return whole.squeeze(0).transpose(0, 1)


def embedding(ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Rows of a table: weight[ids]."""
    return weight[ids]


def top_k_router(logits: torch.Tensor, k: int = 2, normalised: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest of softmax(logits), divided by their sum if normalised, and their experts: (T, k) each; logits (T, E).

    Shazeer et al. 2017, in the order of transformers' Mixtral. Ties are not decided.
    """
    weights, experts = torch.softmax(logits, -1).topk(k, -1)
    return (weights / weights.sum(-1, keepdim=True) if normalised else weights), experts


def top_k_router_of_logits(
    logits: torch.Tensor, k: int = 2, normalised: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """`top_k_router` as the softmax of the k largest logits, in the order of GPT-OSS."""
    top, experts = logits.topk(k, -1)
    return (torch.softmax(top, -1) if normalised else (top - logits.logsumexp(-1, keepdim=True)).exp()), experts


vars(top_k_router)["also"] = (top_k_router_of_logits,)


def moe_combine(outputs: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Σₖ wₖ·yₖ of each token's experts: outputs (T, k, H), weights (T, k) -> (T, H)."""
    return (outputs * weights.unsqueeze(-1)).sum(-2)
