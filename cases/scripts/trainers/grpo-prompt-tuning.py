# TRL 1.16.0, peft 0.21.2: GRPO, RLOO, prompt tuning, P-tuning, prefix tuning, prompts of unequal lengths: log-probs depend on how far a prompt is padded on the left
# peft/peft_model.py:PeftModelForCausalLM.forward puts virtual tokens before the padding and counts positions from there; trl/trainer/grpo_trainer.py hands over no position_ids. Each row beside itself alone; LoRA is right
import datasets
import peft
import torch
import transformers
from setup_lora import model
from setup_tiny import options, tokenizer
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

PROMPTS = ["w2 w3", "w4 w5 w6 w7 w8 w9 w10 w11 w12 w13"]
WAYS = {
    "LoRA": peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False),
    "prompt tuning": peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    "P-tuning": peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=4, encoder_hidden_size=16),
    "prefix tuning": peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
}


def rewarded(completions, **_):
    return [float(i) for i in range(len(completions))]


def off(kind, config, way):
    """How far the log-probs of the step are from those of each row alone, without padding, by prompt."""
    sizes = dict(per_device_train_batch_size=4, num_generations=2, max_completion_length=4, max_steps=1, beta=0.0)
    data = datasets.Dataset.from_list([{"prompt": p} for p in PROMPTS])
    args = config(**options(**sizes, gradient_checkpointing=False))
    policy = peft.get_peft_model(model(), WAYS[way])
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "prompt_encoder" in name:
                parameter.normal_()
    trainer = kind(policy, rewarded, args=args, train_dataset=data, processing_class=tokenizer)
    trainer.remove_callback(transformers.PrinterCallback)
    computed, found = trainer._get_per_token_logps_and_entropies, {}

    def watched(model, ids, mask, keep, *given, **more):
        out = computed(model, ids, mask, keep, *given, **more)
        for row, own, got in zip(ids, mask, out[0]):
            alone = row[own.bool()][None]
            n = int(own[-keep:].sum())
            with torch.no_grad():
                right = computed(model, alone, torch.ones_like(alone), n)[0][0]
            length = alone.shape[1] - n
            found[length] = max(found.get(length, 0), float((got[:n] - right).abs().max()))
        return out

    trainer._get_per_token_logps_and_entropies = watched
    trainer.train()
    return found


print("| trainer | adapter | log-probs of the prompt of 2 tokens off by up to, nats | of 10 |\n|---|---|---|---|")
bad = False
for kind, config in ((GRPOTrainer, GRPOConfig), (RLOOTrainer, RLOOConfig)):
    for way in WAYS:
        found = off(kind, config, way)
        bad |= max(found.values()) > 1e-3
        print(f"| {kind.__name__} | {way} | {found[2]:.2g} | {found[10]:.2g} |")
raise SystemExit(int(bad))
