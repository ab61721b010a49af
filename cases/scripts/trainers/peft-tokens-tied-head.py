# TRL 1.16.0, peft 0.21.2, SFT, LoRA, `chat_template_path` of a model with other tokens, a model with tied embeddings (Llama 3.2 1B, small Qwen): the first forward pass is a ValueError
# trl/trainer/sft_trainer.py sets trainable_token_indices and modules_to_save=["lm_head"]; peft wraps the head twice, and TrainableTokensLayer.forward knows no ModulesToSaveWrapper
import peft
import torch
import transformers
from setup_tiny import tiny

transformers.logging.set_verbosity_error()
IDS = torch.arange(2, 30)[None]
SET = dict(trainable_token_indices={"embed_tokens": [5, 6]}, modules_to_save=["lm_head"])
print("| tied embeddings | what SFT sets | loss |\n|---|---|---|")
wrong = False
for tied in (False, True):
    for names in (["trainable_token_indices"], [*SET]):
        config = tiny().config
        config.tie_word_embeddings = tied
        more = {name: SET[name] for name in names}
        lora = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj"], **more)
        model = peft.get_peft_model(transformers.LlamaForCausalLM(config), lora)
        try:
            found = f"{float(model(input_ids=IDS, labels=IDS).loss.detach()):.2f}"
        except ValueError as error:
            found, wrong = f"ValueError: {error}", True
        print(f"| {tied} | {', '.join(names)} | {found} |", flush=True)
raise SystemExit(int(wrong))
