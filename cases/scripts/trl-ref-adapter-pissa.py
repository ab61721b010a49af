# TRL 1.16: a PeftModel that is handed over with a LoRA made by pissa or olora is another model once the trainer is built
# add_adapter("ref") initialises the copy by the same rule: it moves a second part of the weights, out of what the policy is made of.
import datasets
import peft
import torch
from setup_lora import model
from setup_tiny import PAIRS, options, tokenizer
from trl import DPOConfig, DPOTrainer

ids = torch.tensor([[2, 3, 4, 5, 6]])
print(
    "| init_lora_weights | logits of the policy before and after DPOTrainer(...), largest difference, right: 0 |\n|---|---|"
)
bad = False
for init in (True, "pissa", "olora"):
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=init)
    policy = peft.get_peft_model(model(), lora).eval()
    with torch.no_grad():
        before, data = policy(ids).logits, datasets.Dataset.from_list(PAIRS)
        trainer = DPOTrainer(policy, args=DPOConfig(**options()), train_dataset=data, processing_class=tokenizer)
        moved = float((trainer.model.eval()(ids).logits - before).abs().max())
    bad |= moved > 1e-4
    print(f"| {init} | {moved:.4g} |")
raise SystemExit(int(bad))
