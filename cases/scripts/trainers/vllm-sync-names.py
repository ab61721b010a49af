"""GRPO, RLOO, any trainer with vLLM, models of experts: what the engine makes of the names that TRL sends, with a real vLLM.

A saved checkpoint of each model is loaded, every weight is moved, and TRL's own sync_weights pushes them. The second way
pushes what save_pretrained writes. `asleep`: the same behind a sleep of level 2, which a CPU has not: vLLM's parameters are
set to 0 before the push.
"""

import copy
import tempfile

import safetensors.torch
import setup_vllm as v
import torch
import transformers

SIZE = dict(vocab_size=256, hidden_size=128, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
SIZE |= dict(num_key_value_heads=2, num_experts_per_tok=2, max_position_embeddings=256, initializer_range=0.15)
ROUTED = dict(n_routed_experts=4, n_shared_experts=1, n_group=1, topk_group=1, first_k_dense_replace=1)
ROUTED |= dict(moe_intermediate_size=64)
MLA = dict(
    q_lora_rank=32, kv_lora_rank=512, qk_nope_head_dim=64, qk_rope_head_dim=64, v_head_dim=64, num_key_value_heads=4
)
MAMBA = dict(mamba_n_heads=8, mamba_d_head=32, mamba_n_groups=1, mamba_d_state=16, shared_intermediate_size=64)
KINDS = {
    "Qwen3-MoE": ("Qwen3Moe", dict(num_experts=4, moe_intermediate_size=64, head_dim=32)),
    "GLM-4-MoE": ("Glm4Moe", ROUTED | dict(head_dim=32)),
    "LFM2-MoE": (
        "Lfm2Moe",
        dict(num_experts=4, moe_intermediate_size=64, num_dense_layers=1, layer_types=["conv", "full_attention"])
        | dict(tie_word_embeddings=True),
    ),
    "Mixtral": ("Mixtral", dict(num_local_experts=4)),
    "DeepSeek-V3": ("DeepseekV3", ROUTED | MLA | dict(topk_method="noaux_tc", scoring_func="sigmoid")),
    "GLM-4.7-Flash": ("Glm4MoeLite", ROUTED | MLA | dict(mlp_layer_types=["dense", "sparse"])),
    "Granite 4": ("GraniteMoeHybrid", dict(num_local_experts=4, layer_types=["mamba", "attention"]) | MAMBA),
    "Ernie 4.5 MoE": (
        "Ernie4_5_Moe",
        dict(moe_num_experts=4, moe_k=2, moe_intermediate_size=64, moe_num_shared_experts=1, moe_layer_start_index=1)
        | dict(moe_layer_end_index=1),
    ),
}


def pushed(model, llm):
    """The error that ends TRL's push, or None."""
    try:
        v.pusher(model, llm).sync_weights()
    except (KeyError, ValueError) as error:
        return type(error).__name__


def asleep(model, llm):
    with torch.no_grad():
        for p in v.inside(llm).parameters():
            p.zero_()
    pushed(model, llm)


print(
    "| vLLM's log-probs, nats off | loaded | what is saved, pushed | pushed by TRL | behind a sleep |\n|---|---|---|---|---|"
)
wrong = False
for name, (kind, more) in KINDS.items():
    torch.manual_seed(0)
    made = getattr(transformers, f"{kind}ForCausalLM")
    model = made(made.config_class(**SIZE | more)).eval()
    for key, buffer in model.state_dict().items():
        if "bias" in key and ("correction" in key or "expert" in key):
            buffer.copy_(0.3 * torch.randn_like(buffer))
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        llm = v.engine(v.saved(model, first))
        loaded = v.off(llm, model)
        new = v.moved(copy.deepcopy(model))
        v.saved(new, second)
        written = list(safetensors.torch.load_file(f"{second}/model.safetensors").items())
        error = pushed(new, llm)
        found = v.off(llm, new)
        asleep(new, llm)
        awake = v.off(llm, new)
        v.inside(llm).load_weights(written)
        saved = v.off(llm, new)
        v.closed(llm)
    wrong |= bool(error) or found > 0.01 or awake > 0.01
    said = f"{error}, {found:.2g}" if error else f"{found:.2g}"
    print(f"| {name} | {loaded:.1g} | {saved:.1g} | {said} | {awake:.2g} |", flush=True)
v.end(wrong)
