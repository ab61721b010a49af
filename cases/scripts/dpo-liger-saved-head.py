# TRL 1.13 (below 1.15): DPO with LoRA, the LM head in modules_to_save and use_liger_kernel=True has the wrong reference
# the fused loss takes one head for policy and reference, so the reference is scored with the head that is trained.
import torch
from peft import LoraConfig
from setup_liger_trainer import LIGER, compared, steps
from setup_tiny import PAIRS, tiny
from trl import DPOConfig, DPOTrainer


def run(way):
    torch.manual_seed(0)
    lora = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"])
    return steps(DPOTrainer, DPOConfig, PAIRS, learning_rate=0.01, models={"model": tiny(), "peft_config": lora}, **way)


raise SystemExit(compared(run(LIGER), run({}), "reference kept"))
