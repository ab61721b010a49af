# TRL 1.16: the entropy of float16 logits at a low temperature is NaN, although every log-prob is finite
# logits / temperature overflows to -inf, and probability 0 times log-probability -inf is NaN; 0·log 0 counts as 0.
import torch
from trl.trainer.utils import entropy_from_logits, selective_log_softmax

logits = torch.tensor([[12.0, 11.99, -700.0]], dtype=torch.float16) / 0.01
log_prob = selective_log_softmax(logits, torch.tensor([0]))
found = float(entropy_from_logits(logits))
right = float(torch.distributions.Categorical(logits=logits[:, :2].double()).entropy())
print("| float16 logits (12, 11.99, -700) at temperature 0.01 | |\n|---|---|")
print(f"| log-prob of the first | {float(log_prob):.4g} |")
print(f"| entropy, TRL | {found:.4g} |\n| entropy, definition | {right:.4g} |")
raise SystemExit(int(not abs(found - right) < 1e-2))
