# TRL 1.15 (0.29 to below 1.16): DPO, GRPO and RLOO load the reference with another attention than the policy
# The path of the policy is loaded again with the default, sdpa, which leaves out Gemma-2's softcap on attention scores.
import datasets
from setup_tiny import PAIRS, options, tempfile, tokenizer, torch, transformers
from trl import DPOConfig, DPOTrainer

torch.manual_seed(0)
size = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2)
config = transformers.Gemma2Config(
    vocab_size=32,
    head_dim=8,
    query_pre_attn_scalar=8,
    attn_logit_softcapping=1.0,
    **size,
    pad_token_id=0,
    eos_token_id=1,
)
model, path = transformers.Gemma2ForCausalLM(config), tempfile.mkdtemp()
for name, weight in model.named_parameters():
    if "q_proj" in name or "k_proj" in name:
        weight.data *= 50  # attention scores that reach the cap, as a trained model's do
model.save_pretrained(path)
tokenizer.bos_token = "<eos>"
policy = transformers.Gemma2ForCausalLM.from_pretrained(path, attn_implementation="eager")
quiet = options(per_device_train_batch_size=4, max_steps=1, logging_strategy="steps", logging_steps=1, beta=0.1)
trainer = DPOTrainer(
    policy, args=DPOConfig(**quiet), train_dataset=datasets.Dataset.from_list(PAIRS), processing_class=tokenizer
)
trainer.train()
logged = next(row for row in trainer.state.log_history if "rewards/chosen" in row)
names = ("rewards/chosen", "rewards/rejected")
print("| at step 1, policy = reference | DPOTrainer | right |\n|---|---|---|")
for name in names:
    print(f"| {name} | {logged[name]:.5g} | 0 |")
print(
    f"\nattention: policy {policy.config._attn_implementation}, {trainer.ref_model.config._attn_implementation} reference"
)
raise SystemExit(int(any(abs(logged[name]) > 1e-6 for name in names)))
