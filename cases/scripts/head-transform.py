# TRL 1.16: log-probs of ModernBERT-decoder leave out its prediction head
# add_fused_lm_head multiplies the backbone's states by the output embeddings and skips what the model does between the two.
import torch
import transformers
from trl.trainer.utils import add_fused_lm_head

torch.manual_seed(0)
torch.set_num_threads(1)
config = transformers.ModernBertDecoderConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    local_attention=64,
    cls_token_id=1,
    sep_token_id=2,
    pad_token_id=0,
    layer_types=["sliding_attention", "full_attention"],
)
model = transformers.ModernBertDecoderForCausalLM(config).eval()
model.decoder.weight.data *= 30
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
