# TRL 1.16: with a LoRA that is initialised from the weights (pissa, olora) the reference is not the model that training starts with
# PEFT moves a part of the base weights into such an adapter; the reference is the model without the adapter, so it lacks that part.
import peft
from setup_lora import logged, model
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer

print(
    "| init_lora_weights | DPO, reward of step 0 | loss | KTO, reward of step 0 |\n|---|---|---|---|\n| right | 0 | 0.6931 | 0 |"
)
bad = False
for init in (True, "pissa", "olora"):
    lora = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=init)
    (dpo,), (kto,) = (logged(*kind, model(), lora) for kind in ((DPOTrainer, DPOConfig), (KTOTrainer, KTOConfig)))
    bad |= max(abs(dpo["rewards/chosen"]), abs(kto["rewards/chosen"])) > 1e-3
    print(f"| {init} | {dpo['rewards/chosen']:.4f} | {dpo['loss']:.4f} | {kto['rewards/chosen']:.4f} |")
raise SystemExit(int(bad))
