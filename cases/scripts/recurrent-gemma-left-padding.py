# transformers 5.23: RecurrentGemma's log-probs depend on how far a prompt is padded on the left
# RecurrentGemmaRecurrentBlock.forward takes no attention mask: convolution and recurrence begin with the padding tokens.
import torch
from setup_recurrent_gemma import recurrent_gemma

model = recurrent_gemma(pad_token_id=0).double().eval()
for weight in model.parameters():
    if weight.dim() >= 2:  # as large as a trained model's
        weight.data.normal_(0.0, weight.shape[-1] ** -0.5)
model.model.final_norm.weight.data += 2.0
ids = torch.tensor([[5, 9, 13, 21, 30, 7, 11, 3]])


def log_probs(left):
    padded = torch.nn.functional.pad(ids, (left, 0))
    counted = torch.nn.functional.pad(torch.ones_like(ids), (left, 0))
    with torch.no_grad():
        logits = model(input_ids=padded, attention_mask=counted, use_cache=False).logits[:, left:-1]
    return logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[0, :, 0]


print("| padding tokens on the left | log-prob of the tokens, largest difference to none |\n|---:|---:|")
worst = 0.0
for left in range(5):
    found = float((log_probs(left) - log_probs(0)).abs().max())
    worst = max(worst, found)
    print(f"| {left} | {found:.3g} |")
raise SystemExit(int(worst > 1e-6))
