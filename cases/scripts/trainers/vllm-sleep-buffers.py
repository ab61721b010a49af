"""GRPO, RLOO, `vllm_enable_sleep_mode`: the experts' correction biases are lost at the first sleep (GLM-4-MoE, LFM2-MoE).

TRL puts vLLM to sleep at level 2, which discards its parameters (vLLM saves its buffers), and pushes `named_parameters()`
when it wakes up. The bias that chooses experts is a buffer in transformers and a parameter in vLLM (0.33.0,
models/glm4_moe.py, lfm2_moe.py, nemotron_h.py: `self.gate.e_score_correction_bias = nn.Parameter(...)`): it is in neither.
Fresh memory has no promised content; it is taken for 0 here.
"""

import contextlib
import copy
import types

import torch
import transformers
from trl.generation.vllm_generation import VLLMGeneration

SIZE = dict(vocab_size=32, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2)
SIZE |= dict(num_attention_heads=4, num_key_value_heads=2, num_experts_per_tok=2, max_position_embeddings=64)
KINDS = {
    "GLM-4-MoE": (transformers.Glm4MoeForCausalLM, dict(n_routed_experts=8, n_group=1, topk_group=1, head_dim=8)),
    "LFM2-MoE": (transformers.Lfm2MoeForCausalLM, dict(num_experts=8, layer_types=["conv", "full_attention"])),
    "Qwen3-MoE": (transformers.Qwen3MoeForCausalLM, dict(num_experts=8, head_dim=8)),
}
DENSE = {"GLM-4-MoE": dict(first_k_dense_replace=0), "LFM2-MoE": dict(num_dense_layers=0)}


def sent(model):
    """The names that TRL pushes to vLLM."""
    pushed = object.__new__(VLLMGeneration)
    pushed.model = model
    pushed._dist = types.SimpleNamespace(is_fsdp=False, gather_params=lambda _: contextlib.nullcontext())
    return {name for name, _ in pushed._iter_named_params()}


def logps(model):
    with torch.no_grad():
        return model(input_ids=torch.arange(2, 26)[None]).logits.double().log_softmax(-1)


print("| asleep and awake again | of the checkpoint, not pushed | log-probs off, right: 0 |\n|---|---|---|")
transformers.logging.set_verbosity_error()
wrong = False
for name, (kind, more) in KINDS.items():
    torch.manual_seed(0)
    model = kind(kind.config_class(**SIZE | more | DENSE.get(name, {}))).eval()
    with torch.no_grad():
        for key, value in model.state_dict().items():
            value.copy_(0.1 * torch.randn_like(value) if "bias" in key else 4 * value if value.ndim > 1 else value)
    engine = copy.deepcopy(model)
    here = engine.state_dict()
    lost = sorted({key for key, _ in model.named_buffers() if key in here} - sent(model))
    for key in lost:
        here[key].zero_()
    off = float((logps(model) - logps(engine)).abs().max())
    wrong |= off > 1e-5
    kinds = sorted({key.rsplit(".", 1)[1] for key in lost})
    print(f"| {name} | {', '.join(kinds) or '-'} | {off:.3g} |")
raise SystemExit(int(wrong))
