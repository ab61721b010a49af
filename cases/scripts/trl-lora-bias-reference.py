# TRL 1.16: with LoraConfig(bias="all") or "lora_only" the reference follows the policy
# the biases that are trained are the base model's own, and are on where the adapter is off.
import peft
import transformers
from setup_lora import logged, model
from trl import DPOConfig, DPOTrainer


def qwen2():
    size = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2)
    config = transformers.Qwen2Config(vocab_size=32, pad_token_id=0, eos_token_id=1, **size)
    return transformers.Qwen2ForCausalLM(config)


print("| bias | reference log-prob of the chosen completions, step 1 | step 6, right: as step 1 |\n|---|---|---|")
bad = False
for bias, more in (("none", {}), ("all", {}), ("lora_only", {}), ("all", {"precompute_ref_log_probs": True})):
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "k_proj", "v_proj"], bias=bias)
    rows = logged(DPOTrainer, DPOConfig, model(qwen2), lora, beta=1.0, max_steps=6, learning_rate=0.02, **more)
    found = [row["logps/chosen"] - row["rewards/chosen"] for row in rows]
    bad |= abs(found[-1] - found[0]) > 1e-3
    print(f"| {bias}{', precomputed' * bool(more)} | {found[0]:.4f} | {found[-1]:.4f} |")
raise SystemExit(int(bad))
