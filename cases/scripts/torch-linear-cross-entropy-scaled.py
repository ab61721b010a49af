# torch 2.13: linear_cross_entropy with acc_policy="balanced" loses gradients of float16 that a loss scale should save
# probabilities are held in float16 before the upstream gradient multiplies them: those below 3e-8 are 0.
import torch
from torch.nn import LinearCrossEntropyOptions
from torch.nn.functional import linear_cross_entropy

logits = torch.tensor([[0.0, -19.0]])
options = LinearCrossEntropyOptions(acc_policy="balanced", acc_dtype=torch.float32)
weight = logits.T.half().requires_grad_()
hidden, label = torch.ones(1, 1, dtype=torch.float16), torch.tensor([0])
linear_cross_entropy(hidden, weight, label, reduction="none", options=options).backward(torch.tensor([1024.0]).half())
found, right = float(weight.grad[1, 0]), 1024 * float(logits.double().softmax(-1)[0, 1])
print("| gradient of the rare token's weight, upstream gradient 1,024 | |\n|---|---|")
print(f"| torch, float16 | {found:.6g} |\n| definition | {right:.6g} |")
raise SystemExit(int(not abs(found - right) < 0.1 * right))
