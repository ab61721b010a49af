# peft 0.21.2: two active adapters of OFT, or of C3A on square layers: the forward pass and the merged model differ
# peft/tuners/oft/layer.py: forward rotates the input by the first adapter first, merge rotates the weight so that the second comes first; c3a/layer.py:C3ALinear.forward gives the second adapter the output of the first

import peft
import torch
from setup_peft import logits
from setup_tiny import tiny

SQUARE = ["q_proj", "k_proj", "v_proj", "o_proj"]


def run(config):
    """By two active adapters: the change of the logits, and by how much those of the merged model are off."""
    model = peft.get_peft_model(tiny(), config)
    model.add_adapter("second", config)
    torch.manual_seed(1)
    for name, value in model.named_parameters():
        if ".default" in name or ".second" in name:
            value.data += 0.2 * torch.randn_like(value)
    model.base_model.set_adapter(["default", "second"])
    both = logits(model)
    model.merge_adapter()
    return float((both - logits(tiny())).abs().max()), float((both - logits(model)).abs().max())


kinds = {
    "LoRA": peft.LoraConfig(target_modules=SQUARE),
    "BOFT": peft.BOFTConfig(target_modules=SQUARE, boft_block_size=4),
    "HRA": peft.HRAConfig(target_modules=SQUARE, r=4),
    "OFT": peft.OFTConfig(target_modules=SQUARE, oft_block_size=4),
    "C3A": peft.C3AConfig(target_modules=SQUARE, block_size=8),
}
print("| two active adapters | change the logits by | merged: off by |\n|---|---|---|")
wrong = False
for name, config in kinds.items():
    change, off = run(config)
    print(f"| {name} | {change:.3f} | {off:.2g} |")
    wrong |= off > 1e-3
raise SystemExit(int(wrong))
