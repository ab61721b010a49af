# TRL 1.16: log-probs of RecurrentGemma are those of uncapped logits
# add_fused_lm_head reads the softcap under the name final_logit_softcapping alone; this model calls it logits_soft_cap.
import torch
import transformers
from trl.trainer.utils import add_fused_lm_head

torch.manual_seed(0)
torch.set_num_threads(1)
config = transformers.RecurrentGemmaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    head_dim=16,
    lru_width=32,
    conv1d_width=4,
    attention_window_size=64,
    block_types=["recurrent", "attention"],
    logits_soft_cap=3.0,
)
model = transformers.RecurrentGemmaForCausalLM(config).eval()
model.lm_head.weight.data *= 50  # logits that reach the cap, as a trained model's do
ids = torch.randint(3, 64, (2, 8))
with torch.no_grad():
    logits = model(input_ids=ids).logits.float()
    right = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).flatten()
    add_fused_lm_head(model)
    fused = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids, fused_lm_head=True)
wrong = fused.log_probs.flatten()
off = float((wrong - right).abs().max())
print("| log-prob of | fused LM head | model's own logits |\n|---|---|---|")
for number in range(4):
    print(f"| token {number + 1} | {float(wrong[number]):.5f} | {float(right[number]):.5f} |")
print(f"off by up to {off:.4g} nats")
raise SystemExit(int(off > 1e-3))
