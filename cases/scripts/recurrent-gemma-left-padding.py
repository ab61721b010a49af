# transformers 5.23: RecurrentGemma's log-probs depend on how far a prompt is padded on the left
# RecurrentGemmaRecurrentBlock.forward takes no attention mask: convolution and recurrence begin with the padding tokens.
import torch
from setup_padded import log_probs, trained
from setup_recurrent_gemma import recurrent_gemma

model = trained(recurrent_gemma(pad_token_id=0).double().eval())
model.model.final_norm.weight.data += 2.0
ids = torch.tensor([[5, 9, 13, 21, 30, 7, 11, 3]])

print("| padding tokens on the left | log-prob of the tokens, largest difference to none |\n|---:|---:|")
worst = 0.0
for left in range(5):
    found = float((log_probs(model, ids, left) - log_probs(model, ids, 0)).abs().max())
    worst = max(worst, found)
    print(f"| {left} | {found:.3g} |")
raise SystemExit(int(worst > 1e-6))
