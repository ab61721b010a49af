# TRL 1.16: the reference of a PeftModel that is handed over is no copy of its adapter, where PEFT keeps weights in a ParameterDict
# "ref" is filled by names that hold ".default."; those of LoRA on embeddings, IA3 and LoHa end with ".default".
import peft
import torch
from setup_lora import logged, model
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer

ADAPTERS = {
    "LoRA, q and v": peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]),
    "LoRA, q, v and embed_tokens": peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "embed_tokens"]),
    "LoRA, trainable_token_indices": peft.LoraConfig(
        r=4, target_modules=["q_proj", "v_proj"], trainable_token_indices={"embed_tokens": [4, 7, 11]}
    ),
    "IA3": peft.IA3Config(target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "LoHa": peft.LoHaConfig(r=4, target_modules=["q_proj", "v_proj"]),
}
print("| adapter of the PeftModel | DPO, reward of step 0, right: 0 | KTO, right: 0 |\n|---|---|---|")
bad = False
for name, adapter in ADAPTERS.items():
    found = []
    for kind in ((DPOTrainer, DPOConfig), (KTOTrainer, KTOConfig)):
        policy = peft.get_peft_model(model(), adapter)
        torch.manual_seed(0)
        for parameter in policy.parameters():  # as one that was trained
            if parameter.requires_grad:
                parameter.data.add_(0.3 * torch.randn_like(parameter))
        found.append(logged(*kind, policy)[0]["rewards/chosen"])
    bad |= max(map(abs, found)) > 1e-5
    print(f"| {name} | {found[0]:.5f} | {found[1]:.5f} |")
raise SystemExit(int(bad))
