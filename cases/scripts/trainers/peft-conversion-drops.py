# peft 0.21.2: save_pretrained(path_initial_model_for_weight_conversion=...), which makes a LoRA of an adapter that began with pissa or olora: DoRA's magnitudes and LoRA on embeddings are not in the file
# peft/tuners/lora/model.py:LoraModel.subtract_mutated_init returns the entries with lora_A or lora_B in their name alone; what lacks is initialised where the adapter is loaded
import tempfile

import peft
import torch
from setup_peft import logits
from setup_tiny import tiny


def run(**more):
    """What training changed in the logits, by how much those of the converted adapter are off, saved and trained entries."""
    given = dict(r=4, init_lora_weights="pissa", target_modules=["q_proj", "down_proj"]) | more
    model = peft.get_peft_model(tiny(), peft.LoraConfig(**given))
    first, folder = tempfile.mkdtemp(), tempfile.mkdtemp()
    config = model.peft_config["default"]
    config.init_lora_weights = True  # as peft's own guide saves the beginning
    model.save_pretrained(first)
    config.init_lora_weights = "pissa"
    torch.manual_seed(1)
    for value in model.parameters():
        if value.requires_grad:
            value.data += 0.2 * torch.randn_like(value)
    right = logits(model)
    model.save_pretrained(folder, path_initial_model_for_weight_conversion=first)
    off = float((logits(peft.PeftModel.from_pretrained(tiny(), folder)) - right).abs().max())
    return float((right - logits(tiny())).abs().max()), off


cases = {
    "LoRA": {},
    "DoRA": dict(use_dora=True),
    "LoRA, embed_tokens too": dict(target_modules=["q_proj", "down_proj", "embed_tokens"]),
}
print("| pissa, then converted | training changed the logits by | converted: off by |\n|---|---|---|")
wrong = False
for name, more in cases.items():
    changed, off = run(**more)
    print(f"| {name} | {changed:.3f} | {off:.2g} |")
    wrong |= off > 1e-3
raise SystemExit(int(wrong))
