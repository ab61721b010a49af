# transformers' modules, taken unchanged as definitions of Liger's kernels: casts to float32 stay float64, those back to x.dtype are
# stored. Exits with 1 where one disagrees, or where a mistake agrees.
import torch
from setup_kernels import device  # before triton

# isort: split
import torch.nn.functional as F
from liger_kernel.transformers.rms_norm import LigerRMSNorm
from liger_kernel.transformers.rope import liger_rotary_pos_emb
from transformers import MixtralConfig
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.t5.modeling_t5 import T5LayerNorm

from parity.testing import EAGER, check_parity

CONFIG = MixtralConfig(hidden_size=48, num_attention_heads=3, head_dim=16, num_local_experts=8)


def norm(make, theirs, dtype, centre=1.0):
    def judged(eps):
        ours, definition = make(eps), theirs(96)
        for module in (ours, definition):
            torch.nn.init.normal_(module.weight, centre, 0.3, torch.Generator().manual_seed(0))
            module.to(device, dtype)
        x = torch.randn(5, 96, generator=torch.Generator().manual_seed(1)) * 3
        return check_parity(ours, definition, {"x": x.to(device, dtype)})

    return judged(1e-6), judged(1.0)


def liger(eps):
    return LigerRMSNorm(96, eps, in_place=False)


def gemma(eps):
    return LigerRMSNorm(96, eps, offset=1.0, casting_mode="gemma", in_place=False)


def rotary(dtype):
    given = {n: torch.randn(2, heads, 5, 16, device=device).to(dtype) for n, heads in (("q", 3), ("k", 1))}
    cos, sin = LlamaRotaryEmbedding(CONFIG)(given["q"], torch.arange(5, device=device)[None].expand(2, -1))
    given |= {"cos": cos, "sin": sin}
    more = {"grad": ("q", "k"), "in_place": ("q", "k"), "recipe": EAGER, "protocol": "none"}
    turned = lambda q, k, cos, sin: liger_rotary_pos_emb(q, k, cos, -sin)  # noqa: E731
    return tuple(check_parity(f, apply_rotary_pos_emb, given, **more) for f in (liger_rotary_pos_emb, turned))


def router(dtype):
    module = MixtralTopKRouter(CONFIG)
    torch.nn.init.normal_(module.weight, 0.0, 0.3)
    given = {"hidden_states": torch.randn(9, 48).to(dtype), "weight": module.weight.detach().to(dtype)}

    def define(hidden_states, weight):
        return torch.func.functional_call(module, {"weight": weight}, (hidden_states,))

    def fused(hidden_states, weight, scale=1.0):  # a softmax of the chosen logits alone
        logits = F.linear(hidden_states, weight)
        values, ids = logits.float().topk(CONFIG.num_experts_per_tok, -1)
        return logits, (scale * values).softmax(-1), ids

    wrong = lambda **x: fused(**x, scale=1.01)  # noqa: E731
    return tuple(check_parity(f, define, given, recipe=EAGER, protocol="none") for f in (fused, wrong))


print("| definition | kernel | dtype | error ÷ allowed | of a mistake |\n|---|---|---|---|---|")
failed = 0
for dtype in (torch.float32, torch.float16):
    for name, kernel, pair in (
        ("LlamaRMSNorm", "Liger's", norm(liger, LlamaRMSNorm, dtype)),
        ("T5LayerNorm", "Liger's", norm(liger, T5LayerNorm, dtype)),
        ("GemmaRMSNorm", "Liger's", norm(gemma, GemmaRMSNorm, dtype, 0.0)),
        ("apply_rotary_pos_emb", "Liger's", rotary(dtype)),
        ("MixtralTopKRouter", "by hand", router(dtype)),
    ):
        right, wrong = pair
        failed += not right.agrees or wrong.agrees
        print(f"| {name} | {kernel} | {str(dtype)[6:]} | {right.headroom:.2g} | {wrong.headroom:.2g} |")
raise SystemExit(int(failed > 0))
