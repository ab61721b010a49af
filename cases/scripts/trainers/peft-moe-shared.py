# peft 0.21.2, transformers 5.23.0: LoRA on DeepSeek-V3, GLM-4-MoE, Qwen3-MoE, Qwen3-Next, Ernie 4.5: gate_proj, up_proj, down_proj in target_modules, or all-linear, leave out the shared experts and the dense layers; an adapter that transformers 4 saved loses its weights there
# peft/utils/transformers_weight_conversion.py:_convert_peft_config_moe moves these names from target_modules to target_parameters, which only the routed experts have; "all-linear" is "all linear/Conv1D modules"
import tempfile
import warnings

import peft
import safetensors.torch
import torch
import transformers
from peft.tuners.tuners_utils import BaseTunerLayer

warnings.simplefilter("ignore")
transformers.logging.set_verbosity_error()
NAMES = ["q_proj", "gate_proj", "up_proj", "down_proj"]
SIZE = dict(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
SIZE |= dict(num_key_value_heads=2, num_experts_per_tok=2, moe_intermediate_size=16, head_dim=8, pad_token_id=0)
ROUTED = dict(n_routed_experts=4, n_group=1, topk_group=1, first_k_dense_replace=1, n_shared_experts=1)
LATENT = dict(q_lora_rank=None, kv_lora_rank=8, qk_rope_head_dim=8, qk_nope_head_dim=4, v_head_dim=8)
LINEAR = dict(linear_num_value_heads=2, linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8)
ERNIE = dict(moe_num_experts=4, moe_k=2, moe_layer_start_index=1, moe_num_shared_experts=1)
MODELS = {
    "olmoe": dict(num_experts=4),
    "qwen3_moe": dict(num_experts=4, mlp_only_layers=[0]),
    "qwen3_next": dict(num_experts=4, shared_expert_intermediate_size=16, layer_types=["full_attention"] * 2, **LINEAR),
    "ernie4_5_moe": ERNIE,
    "glm4_moe": ROUTED,
    "deepseek_v3": ROUTED | LATENT,
}


def built(name):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(name, **SIZE | MODELS[name])
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def without(name, targets):
    """Linear modules that `targets` names, and those of them that got no adapter."""
    model = built(name)
    named = [
        key
        for key, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
        and key != "lm_head"
        and (targets == "all-linear" or key.split(".")[-1] in targets)
    ]
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules=targets)).base_model.model
    return named, [key for key in named if not isinstance(model.get_submodule(key), BaseTunerLayer)]


def saved_by_4(name):
    """Largest distance of logits: an adapter on the linear modules, as transformers 4 saved it, loaded and merged by hand; what it changes."""
    ids, model, folder, saved = torch.arange(2, 20)[None], built(name), tempfile.mkdtemp(), {}
    with torch.no_grad():
        base = model(input_ids=ids).logits
        for key, module in model.named_modules():
            if isinstance(module, torch.nn.Linear) and key.split(".")[-1] in NAMES:
                a, b = torch.randn(4, module.in_features), torch.randn(module.out_features, 4) / 10
                saved |= {f"base_model.model.{key}.lora_A.weight": a, f"base_model.model.{key}.lora_B.weight": b}
                module.weight += b @ a
            elif key.endswith("experts") and hasattr(module, "gate_up_proj"):
                for expert in range(4):
                    parts = list(module.gate_up_proj[expert].chunk(2)) + [module.down_proj[expert]]
                    for leaf, weight in zip(NAMES[1:], parts, strict=True):
                        a, b = torch.randn(4, weight.shape[1]), torch.randn(weight.shape[0], 4) / 10
                        saved[f"base_model.model.{key}.{expert}.{leaf}.lora_A.weight"] = a
                        saved[f"base_model.model.{key}.{expert}.{leaf}.lora_B.weight"] = b
                        weight += b @ a
        right = model(input_ids=ids).logits
        safetensors.torch.save_file(
            {key: value.contiguous() for key, value in saved.items()}, f"{folder}/adapter_model.safetensors"
        )
        peft.LoraConfig(r=4, lora_alpha=4, target_modules=NAMES, base_model_name_or_path="").save_pretrained(folder)
        loaded = peft.PeftModel.from_pretrained(built(name), folder).eval()
        return float((loaded(input_ids=ids).logits - right).abs().max()), float((right - base).abs().max())


print(
    "| model | gate_proj, up_proj, down_proj, q_proj: linear modules without an adapter | all-linear | an adapter of transformers 4, loaded: logits are off by | it changes them by |"
)
print("|---|---|---|---|---|")
wrong = False
for name in MODELS:
    cells = []
    for targets in (NAMES, "all-linear"):
        named, left = without(name, targets)
        cells.append(f"{len(left)} of {len(named)}")
        wrong |= bool(left)
    off, change = saved_by_4(name)
    wrong |= off > 1e-4
    print(f"| {name} | {' | '.join(cells)} | {off:.2g} | {change:.2g} |", flush=True)
raise SystemExit(int(wrong))
