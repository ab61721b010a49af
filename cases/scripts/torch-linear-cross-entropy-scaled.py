# torch 2.13: chunked linear_cross_entropy loses gradients of float16 that a loss scale should save
# acc_policy="balanced" holds probabilities in float16 before the upstream gradient multiplies them, and with reduction="mean"
# or "sum" the gradients themselves are stored in float16 in the forward pass: those below 3e-8 are 0.
import torch
from torch.nn import LinearCrossEntropyOptions
from torch.nn.functional import linear_cross_entropy

logits = torch.tensor([[0.0, -19.0]])
hidden, label = torch.ones(1, 1, dtype=torch.float16), torch.tensor([0])
right = 1024 * float(logits.double().softmax(-1)[0, 1])


def gradient(reduction: str, **policy: object) -> float:
    weight = logits.T.half().requires_grad_()
    options = LinearCrossEntropyOptions(**policy) if policy else None
    loss = linear_cross_entropy(hidden, weight, label, reduction=reduction, options=options)
    loss.backward(torch.full_like(loss, 1024.0))
    return float(weight.grad[1, 0])


found = {
    "plain, mean": gradient("mean"),
    "balanced, none": gradient("none", acc_policy="balanced", acc_dtype=torch.float32),
    "accurate, mean": gradient("mean", acc_policy="accurate"),
}
print("| gradient of the rare token's weight, upstream gradient 1,024 | |\n|---|---|")
for name, value in found.items():
    print(f"| torch, float16, {name} | {value:.6g} |")
print(f"| definition | {right:.6g} |")
raise SystemExit(int(any(not abs(value - right) < 0.1 * right for value in found.values())))
