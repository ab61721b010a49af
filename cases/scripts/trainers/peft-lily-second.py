# peft 0.21.2, Lily: a second adapter, of add_adapter or load_adapter, does not share its B between the layers: it trains other weights, and is another model when it is saved and loaded
# peft/tuners/tuners_utils.py:BaseTuner.__init__ alone calls _post_injection_hook, in which LilyModel ties A and B; inject_adapter, which the second goes through, does not
import tempfile

import peft
import torch
from setup_peft import logits
from setup_tiny import tiny


def made():
    return peft.LilyConfig(target_modules=["q_proj", "v_proj", "up_proj", "down_proj"], r=4, task_type="CAUSAL_LM")


def run(second):
    """Trained parameters of the adapter, what it changes in the logits, and by how much those of the loaded one are off."""
    model, name, folder = peft.get_peft_model(tiny(), made()), "default", tempfile.mkdtemp()
    if second:
        name = "second"
        model.add_adapter(name, made())
        model.set_adapter(name)
    torch.manual_seed(1)
    own = [value for value in model.parameters() if value.requires_grad]
    for value in own:
        value.data += 0.2 * torch.randn_like(value)
    right = logits(model)
    model.save_pretrained(folder, selected_adapters=[name])
    loaded = peft.PeftModel.from_pretrained(tiny(), f"{folder}/{name}" if second else folder)
    off = float((logits(loaded) - right).abs().max())
    return sum(value.numel() for value in own), float((right - logits(tiny())).abs().max()), off


print("| Lily | trained parameters | change the logits by | loaded: off by |\n|---|---|---|---|")
wrong = False
for second in (False, True):
    count, change, off = run(second)
    print(f"| {'a second' if second else 'the first'} adapter | {count} | {change:.3f} | {off:.2g} |")
    wrong |= off > 1e-3
raise SystemExit(int(wrong))
