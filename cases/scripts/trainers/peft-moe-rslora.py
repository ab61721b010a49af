# peft 0.21.2, transformers 5.23.0: `use_rslora` on experts (Mixtral, OLMoE, Qwen3-MoE, DeepSeek-V3): gate and up get √2 of the scale that lora_alpha / √r is, also where an adapter of transformers 4 is loaded
# peft/utils/transformers_weight_conversion.py:_convert_peft_config_moe doubles rank and alpha of gate_up_proj, which "keeps alpha/r unchanged"; alpha/√r it does not
import tempfile
import warnings

import peft
import safetensors.torch
import torch
import transformers
from setup_tiny import experts

warnings.simplefilter("ignore")
transformers.logging.set_verbosity_error()
NAMES, ALPHA, R = ["w1", "w3", "w2"], 8, 4


def run(rslora):
    """By projection: the change of an expert's weight in the loaded model, by what was trained; the logits' distance, and the change."""
    ids, model, folder, saved, change = torch.arange(2, 20)[None], experts().eval(), tempfile.mkdtemp(), {}, {}
    scale = ALPHA / (R**0.5 if rslora else R)
    with torch.no_grad():
        before = model(input_ids=ids).logits
        for layer, block in enumerate(model.model.layers):
            for expert in range(4):
                gate, up = block.mlp.experts.gate_up_proj[expert].chunk(2)
                for leaf, weight in zip(NAMES, (gate, up, block.mlp.experts.down_proj[expert]), strict=True):
                    a, b = torch.randn(R, weight.shape[1]), torch.randn(weight.shape[0], R) / 20
                    name = f"base_model.model.model.layers.{layer}.block_sparse_moe.experts.{expert}.{leaf}"
                    saved |= {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}
                    change[layer, expert, leaf] = scale * b @ a
                    weight += change[layer, expert, leaf]
        right = model(input_ids=ids).logits
        safetensors.torch.save_file(saved, f"{folder}/adapter_model.safetensors")
        given = dict(r=R, lora_alpha=ALPHA, use_rslora=rslora, target_modules=NAMES, base_model_name_or_path="")
        peft.LoraConfig(**given).save_pretrained(folder)
        loaded = peft.PeftModel.from_pretrained(experts().eval(), folder).eval()
        off = float((loaded(input_ids=ids).logits - right).abs().max())
        old, new = experts().model.layers[0].mlp.experts, loaded.merge_and_unload().model.layers[0].mlp.experts
        for weights in (old, new):
            weights.parts = [*weights.gate_up_proj[0].chunk(2), weights.down_proj[0]]
        found = [
            float((after - first).norm() / change[0, 0, leaf].norm())
            for leaf, first, after in zip(NAMES, old.parts, new.parts, strict=True)
        ]
    return found, off, float((right - before).abs().max())


print(
    "| Mixtral, an adapter of transformers 4 | gate (w1), change by right change | up (w3) | down (w2) | logits off by | changed by |"
)
print("|---|---|---|---|---|---|")
wrong = False
for rslora in (False, True):
    found, off, change = run(rslora)
    print(f"| use_rslora={rslora} | {' | '.join(f'{value:.4f}' for value in found)} | {off:.2g} | {change:.2g} |")
    wrong |= any(abs(value - 1) > 1e-3 for value in found)
raise SystemExit(int(wrong))
