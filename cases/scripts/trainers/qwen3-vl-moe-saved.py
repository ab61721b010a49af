"""Any trainer, Qwen3-VL-MoE: a saved model has its experts in another layout than the checkpoint that was loaded.

The published checkpoints have them transposed. transformers 5 transposes where the shape is not the module's; saving asks the
same question, and there the shape always is: nothing is transposed back. vLLM 0.32 cannot load what is saved (RuntimeError).
"""

import tempfile

import safetensors.torch
import torch
import transformers

SIZE = dict(vocab_size=256, hidden_size=128, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4)
SIZE |= dict(num_key_value_heads=2, head_dim=32, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=96)
SIZE |= dict(rope_parameters=dict(rope_type="default", rope_theta=1e4, mrope_section=[4, 6, 6]))
EYES = dict(depth=1, hidden_size=64, intermediate_size=64, num_heads=2, out_hidden_size=128)
EYES |= dict(num_position_embeddings=16, deepstack_visual_indexes=[0])


def experts(folder):
    return {k: v for k, v in safetensors.torch.load_file(f"{folder}/model.safetensors").items() if ".experts." in k}


transformers.logging.set_verbosity_error()
torch.manual_seed(0)
made = transformers.Qwen3VLMoeForConditionalGeneration
model = made(transformers.Qwen3VLMoeConfig(text_config=SIZE, vision_config=EYES))
with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
    model.save_pretrained(first)
    whole = safetensors.torch.load_file(f"{first}/model.safetensors")
    whole |= {k: v.mT.contiguous() for k, v in experts(first).items()}
    safetensors.torch.save_file(whole, f"{first}/model.safetensors", metadata={"format": "pt"})
    made.from_pretrained(first).save_pretrained(second)
    published, saved = experts(first), experts(second)
print("| tensor | published | loaded and saved again |\n|---|---|---|")
wrong = False
for name, value in published.items():
    wrong |= value.shape != saved[name].shape
    print(f"| {name.rsplit('.', 1)[1]} | {tuple(value.shape)} | {tuple(saved[name].shape)} |")
raise SystemExit(int(wrong))
