# TRL 1.16: the entropy of a distribution with a banned token (logit -inf) is NaN, and so is its gradient
# probability 0 times log-probability -inf is NaN; in an entropy 0·log 0 counts as 0.
import math

import torch
from trl.kernels.chunked_logprob import ChunkedLogProbFunction
from trl.trainer.utils import entropy_from_logits

logits = torch.tensor([[0.0, 0.0, -math.inf]], requires_grad=True)
plain = entropy_from_logits(logits)
plain.sum().backward()
weight = torch.zeros(3, 1, requires_grad=True)
bias = torch.tensor([0.0, 0.0, -math.inf], requires_grad=True)
hidden, target = torch.zeros(1, 1), torch.zeros(1, dtype=torch.long)
fused = ChunkedLogProbFunction.apply(hidden, weight, bias, target, 1.0, 8192, None, 1.0, ("log_probs", "entropy"))[1]
fused.sum().backward()
right = math.log(2)  # two tokens of probability 1/2
print("| logits (0, 0, -inf) | entropy | its gradient |\n|---|---|---|")
for name, value, grad in (("entropy_from_logits", plain, logits.grad), ("fused LM head", fused, bias.grad)):
    print(f"| {name} | {value.item():.6g} | {grad.flatten().tolist()} |")
print(f"| definition | {right:.6g} | [0.0, 0.0, 0.0] |")
values = torch.cat([plain - right, fused - right, logits.grad[0], bias.grad])
raise SystemExit(int(not bool((values.abs() < 1e-6).all())))
