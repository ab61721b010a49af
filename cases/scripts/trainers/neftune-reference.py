"""DPO and KTO with neftune_noise_alpha: with a LoRA the reference is the policy with its adapter off, and NEFTune's hook on.

Without LoRA, and with precompute_ref_log_probs, the reference has no noise.
"""

import peft
from setup_lora import logged, model
from setup_self import saved
from trl import DPOConfig, DPOTrainer

WAYS = {"no LoRA": {}, "LoRA": {}, "LoRA, precomputed": {"precompute_ref_log_probs": True}}
print("| learning rate 0 | reference log-prob of the chosen completions, steps 1 to 3, right: all alike |\n|---|---|")
bad = False
for name, more in WAYS.items():
    lora = None if name == "no LoRA" else peft.LoraConfig()
    given = dict(max_steps=3, beta=1.0, neftune_noise_alpha=5.0, **more)
    rows = logged(DPOTrainer, DPOConfig, saved(model()), lora, **given)
    found = [row["logps/chosen"] - row["rewards/chosen"] for row in rows]
    bad |= max(found) - min(found) > 1e-3
    print(f"| {name} | {', '.join(f'{x:.4f}' for x in found)} |")
raise SystemExit(int(bad))
