# TRL 1.16: quantisation-aware training of lm_head is left out of log-probs
# add_fused_lm_head takes the weight of a torch.ao.nn.qat.Linear that is not quantised; generation and export use the quantised one.
import torch
import transformers
from trl.trainer.utils import add_fused_lm_head

torch.manual_seed(0)
torch.set_num_threads(1)
model = transformers.LlamaForCausalLM(
    transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
    )
).eval()
model.lm_head.weight.data *= 20
quantised = torch.ao.nn.qat.Linear(32, 64, bias=False, qconfig=torch.ao.quantization.get_default_qat_qconfig("fbgemm"))
quantised.weight = model.lm_head.weight
model.lm_head = quantised
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
