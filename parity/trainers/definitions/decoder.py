"""The tiny models' decoders written out from their papers: logits from ids and parameters, without transformers' code.

Every other definition runs the model's own forward, as the trainer does: what is wrong in both is seen by neither.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu, linear, silu

from parity.trainers.definitions import scored
from parity.trainers.rig import models

GEMMA = ("scaled embedding", "one more", "four norms", "tanh GELU", "windows")
WRITTEN: Mapping[str, tuple[str, ...]] = {
    "llama": (),
    models.GROUPED: (),
    "qwen2": (),
    "qwen3": ("head norms",),
    "qwen3_moe": ("head norms", "experts"),
    "granite": ("multipliers",),
    "gemma2": GEMMA,
    "gemma3": (*GEMMA, "head norms"),
    "granite_vision": ("multipliers",),
    "cohere": ("parallel", "centred", "interleaved"),
    "cohere2_vision": ("parallel", "centred", "interleaved", "windows", "turned in windows"),
    "phi": ("parallel", "centred", "one projection", "tanh GELU"),
    "gpt_oss": ("windows", "sinks", "clipped experts"),
}
"""Architecture of `models` -> how it differs from Llama (arXiv 2302.13971, section 2.2)."""
SLIDING = "sliding_attention"


def logits(model: Any, name: str, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
    """Logits (T_i, V) of each sequence by the parameters and the config of `model`; by its own forward, without a cache, where
    `name` is not of `WRITTEN`."""
    if name not in WRITTEN:
        return scored.logits(model, sequences)
    decoder = _Decoder(model, name)
    return [decoder(torch.tensor(ids)) for ids in sequences]


class _Decoder:
    """`p`: every parameter by its name behind the prefix of the language model; `head`: what gives logits, with its bias."""

    def __init__(self, model: Any, name: str):
        self.has, self.config = WRITTEN[name], model.config.get_text_config()
        named = dict(model.named_parameters(remove_duplicate=False))
        prefix = next(n for n in named if n.endswith("embed_tokens.weight")).removesuffix("embed_tokens.weight")
        self.p = {n.removeprefix(prefix): x for n, x in named.items()}
        # older releases have the head of a model of images beside its text model
        self.p |= {n[n.index("lm_head.") :]: x for n, x in named.items() if "lm_head." in n}

    def __call__(self, ids: Tensor) -> Tensor:
        c, p = self.config, self.p
        x = p["embed_tokens.weight"][ids]
        x = x * math.sqrt(c.hidden_size) if "scaled embedding" in self.has else x
        x = x * c.embedding_multiplier if "multipliers" in self.has else x
        for layer in range(c.num_hidden_layers):
            x = self.layer(x, layer)
        x = self.norm(x, "final_layernorm" if "one projection" in self.has else "norm")
        z = linear(x, p.get("lm_head.weight", p["embed_tokens.weight"]), p.get("lm_head.bias"))
        z = z * getattr(c, "logit_scale", 1.0) / getattr(c, "logits_scaling", 1.0)
        return _capped(z, getattr(c, "final_logit_softcapping", None))

    def layer(self, x: Tensor, layer: int) -> Tensor:
        """Llama: x + A(norm x), then x + F(norm x). Parallel (GPT-J): x + A(norm x) + F(norm x), with one norm."""
        at, share = f"layers.{layer}.", self.config.residual_multiplier if "multipliers" in self.has else 1.0
        h = self.norm(x, at + "input_layernorm")
        attended = self.attention(h, f"{at}self_attn.", layer)
        if "parallel" in self.has:
            return x + attended + self.feed_forward(h, f"{at}mlp.")
        four = "four norms" in self.has
        x = x + share * (self.norm(attended, at + "post_attention_layernorm") if four else attended)
        h = self.norm(x, at + ("pre_feedforward_layernorm" if four else "post_attention_layernorm"))
        out = self.feed_forward(h, f"{at}mlp.")
        return x + share * (self.norm(out, at + "post_feedforward_layernorm") if four else out)

    def norm(self, x: Tensor, name: str) -> Tensor:
        """RMSNorm (arXiv 1910.07467, equation 4), Gemma's by 1 + w; centred: LayerNorm (arXiv 1607.06450)."""
        weight, c = self.p[f"{name}.weight"], self.config
        if "centred" in self.has:
            x = x - x.mean(-1, keepdim=True)
        eps = c.layer_norm_eps if "centred" in self.has else c.rms_norm_eps
        x = x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * (weight + ("one more" in self.has))
        return x + self.p[f"{name}.bias"] if "one projection" in self.has else x

    def attention(self, x: Tensor, at: str, layer: int) -> Tensor:
        """softmax(q·k / √d)·v over the tokens before, with grouped keys and values (arXiv 2305.13245). A sink is a score of each
        head that takes its share of the softmax and has no value (gpt-oss, arXiv 2508.10925)."""
        c, count = self.config, len(x)
        kind = (getattr(c, "layer_types", None) or (SLIDING, "full_attention") * c.num_hidden_layers)[layer]
        dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
        named = [f"{at}{name}_proj" for name in "qkv"]
        projected = (linear(x, self.p[f"{name}.weight"], self.p.get(f"{name}.bias")) for name in named)
        q, k, v = (y.view(count, -1, dim).transpose(0, 1) for y in projected)
        if "head norms" in self.has:
            q, k = self.norm(q, at + "q_norm"), self.norm(k, at + "k_norm")
        if kind == SLIDING or "turned in windows" not in self.has:  # the others know no positions (arXiv 2504.00698)
            q, k = self.turned(q, kind), self.turned(k, kind)
        k, v = (y.repeat_interleave(len(q) // len(y), 0) for y in (k, v))
        scale = 1 / math.sqrt(c.query_pre_attn_scalar if "four norms" in self.has else dim)
        scale = c.attention_multiplier if "multipliers" in self.has else scale
        z = _capped(scale * (q @ k.transpose(1, 2)), getattr(c, "attn_logit_softcapping", None))
        back = torch.arange(count)[:, None] - torch.arange(count)
        slides = kind == SLIDING and "windows" in self.has
        seen = (back >= 0) & (back < c.sliding_window) if slides else back >= 0
        z = torch.where(seen, z, -torch.inf)
        if "sinks" in self.has:
            z = torch.cat([self.p[f"{at}sinks"][:, None, None].expand(-1, count, 1), z], -1)
        out = torch.softmax(z, -1)[..., -count:] @ v
        name = f"{at}dense" if "one projection" in self.has else f"{at}o_proj"
        return linear(out.transpose(0, 1).reshape(count, -1), self.p[f"{name}.weight"], self.p.get(f"{name}.bias"))

    def turned(self, x: Tensor, kind: str) -> Tensor:
        """RoPE (arXiv 2104.09864, equation 34): pairs of dimensions turned by position · θ^(-2i/d), a pair one half apart or,
        interleaved, side by side."""
        c = self.config
        size = int(x.shape[-1] * _rope(c, kind, "partial_rotary_factor", 1.0))
        rates = _rope(c, kind, "rope_theta", 10_000.0) ** (-torch.arange(0, size, 2, dtype=x.dtype) / size)
        angle = torch.arange(x.shape[-2], dtype=x.dtype)[:, None] * rates
        cos, sin = angle.cos(), angle.sin()
        beside = "interleaved" in self.has
        a, b = (x[..., 0:size:2], x[..., 1:size:2]) if beside else (x[..., : size // 2], x[..., size // 2 : size])
        turned = a * cos - b * sin, a * sin + b * cos
        joined = torch.stack(turned, -1).flatten(-2) if beside else torch.cat(turned, -1)
        return torch.cat([joined, x[..., size:]], -1)

    def feed_forward(self, x: Tensor, at: str) -> Tensor:
        """SwiGLU or GeGLU (arXiv 2002.05202): (f(x·gate) ⊙ x·up)·down; Phi's has no gate."""
        p = self.p
        if "experts" in self.has:
            return self.experts(x, at)
        if "clipped experts" in self.has:
            return self.clipped_experts(x, at)
        if "one projection" in self.has:
            h = linear(x, p[f"{at}fc1.weight"], p[f"{at}fc1.bias"])
            return linear(self.activation(h), p[f"{at}fc2.weight"], p[f"{at}fc2.bias"])
        gate, up = (linear(x, p[f"{at}{name}_proj.weight"]) for name in ("gate", "up"))
        return linear(self.activation(gate) * up, p[f"{at}down_proj.weight"])

    def activation(self, x: Tensor) -> Tensor:
        return gelu(x, approximate="tanh") if "tanh GELU" in self.has else silu(x)

    def experts(self, x: Tensor, at: str) -> Tensor:
        """Σ p_e·E_e(x) over the k experts of the largest p = softmax(x·router) (Qwen3, arXiv 2505.09388)."""
        c, p = self.config, torch.softmax(linear(x, self.p[f"{at}gate.weight"]), -1)
        chosen = torch.nn.functional.one_hot(p.topk(c.num_experts_per_tok, -1).indices, c.num_experts).sum(-2)
        p = p * chosen
        p = p / p.sum(-1, keepdim=True) if c.norm_topk_prob else p
        out = torch.zeros_like(x)
        for e in range(c.num_experts):
            gate, up, down = self.expert(f"{at}experts.", e)
            out = out + p[:, e, None] * linear(silu(linear(x, gate)) * linear(x, up), down)
        return out

    def clipped_experts(self, x: Tensor, at: str) -> Tensor:
        """Σ p_e·E_e(x) over the k experts of the largest x·router + b, p their softmax; E(x) = ((u + 1) ⊙ g·σ(1.702·g))·down + b,
        of gate g and up u, side by side, within ±7 or what the config says, g without a lower limit (arXiv 2508.10925)."""
        c, p = self.config, self.p
        z = linear(x, p[f"{at}router.weight"], p[f"{at}router.bias"])
        kept = torch.nn.functional.one_hot(z.topk(c.num_experts_per_tok, -1).indices, z.shape[-1]).sum(-2) > 0
        share = torch.softmax(torch.where(kept, z, -torch.inf), -1)
        limit = c.swiglu_limit if hasattr(type(c), "swiglu_limit") else 7.0  # older releases have no such field
        gate_up, down = (p[f"{at}experts.{name}_proj"] for name in ("gate_up", "down"))
        gate_up_bias, down_bias = (p[f"{at}experts.{name}_proj_bias"] for name in ("gate_up", "down"))
        out = torch.zeros_like(x)
        for e in range(z.shape[-1]):
            h = x @ gate_up[e] + gate_up_bias[e]
            gate, up = h[..., ::2].clamp(max=limit), h[..., 1::2].clamp(-limit, limit)
            out = out + share[:, e, None] * (((up + 1) * gate * torch.sigmoid(1.702 * gate)) @ down[e] + down_bias[e])
        return out

    def expert(self, at: str, e: int) -> tuple[Tensor, Tensor, Tensor]:
        """Each expert's projections: of its own up to transformers 4, all in one tensor since."""
        if f"{at}gate_up_proj" in self.p:
            gate, up = self.p[f"{at}gate_up_proj"][e].chunk(2)
            return gate, up, self.p[f"{at}down_proj"][e]
        gate, up, down = (self.p[f"{at}{e}.{name}_proj.weight"] for name in ("gate", "up", "down"))
        return gate, up, down


def _rope(config: Any, kind: str, name: str, default: float) -> float:
    """A number of the rotary embedding: in a table, one for each kind of layer where there are two, since transformers 5."""
    table = getattr(config, "rope_parameters", None) or {}
    table = table.get(kind, table)
    local = kind == SLIDING and hasattr(config, "rope_local_base_freq") and name == "rope_theta"
    found = table.get(name, getattr(config, "rope_local_base_freq" if local else name, default))
    return float(found)


def _capped(z: Tensor, cap: float | None) -> Tensor:
    """c·tanh(z/c) (Gemma 2, arXiv 2408.00118)."""
    return z if cap is None else cap * torch.tanh(z / cap)
