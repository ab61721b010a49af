# peft 0.21.2: add_weighted_adapter of adapters with use_rslora: the combined one is sqrt(r) times too large
# peft/tuners/lora/model.py:LoraModel.add_weighted_adapter sets lora_alpha to the new rank for a scaling of 1, and keeps use_rslora, by which alpha is divided by sqrt(r)
import peft
import torch
import transformers

transformers.logging.set_verbosity_error()
print(
    "| two adapters of rank 4, weights 1 and 1, q_proj of the first layer | combined delta / sum of the two, right: 1 |\n|---|---|"
)
wrong = False
for rslora in (False, True):
    for kind in ("cat", "svd"):
        torch.manual_seed(0)
        size = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=32)
        base = transformers.LlamaForCausalLM(transformers.LlamaConfig(**size))
        config = peft.LoraConfig(r=4, init_lora_weights=False, use_rslora=rslora, task_type="CAUSAL_LM")
        model = peft.get_peft_model(base, config, adapter_name="one")
        model.add_adapter("two", config)
        more = dict(svd_rank=8) if kind == "svd" else {}
        model.add_weighted_adapter(["one", "two"], [1.0, 1.0], "both", combination_type=kind, **more)
        layer = model.base_model.model.model.layers[0].self_attn.q_proj
        right = layer.get_delta_weight("one") + layer.get_delta_weight("two")
        found = float(layer.get_delta_weight("both").norm() / right.norm())
        print(f"| use_rslora={rslora}, {kind} | {found:.4f} |")
        wrong |= abs(found - 1) > 1e-3
raise SystemExit(int(wrong))
