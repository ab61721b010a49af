# torch 2.13: the chunked linear_cross_entropy takes the gradient of the head as a difference of two long sums
# softmax(z).T @ hidden, less the hidden states of the targets, added one by one: where tokens are confident both are large.
import torch
from torch.nn import LinearCrossEntropyOptions
from torch.nn.functional import linear_cross_entropy

torch.manual_seed(0)
hidden, label = torch.rand(36_864, 2) + 1, torch.zeros(36_864, dtype=torch.long)
weight = torch.tensor([[4.0, 4.0], [0.0, 0.0]])


def gradient(dtype: torch.dtype, **more: object) -> torch.Tensor:
    w = weight.to(dtype, copy=True).requires_grad_()
    linear_cross_entropy(hidden.to(dtype), w, label, reduction="sum", **more).backward()
    return w.grad.double()


right = gradient(torch.float64)
plain, chunked = gradient(torch.float32), gradient(torch.float32, options=LinearCrossEntropyOptions())
errors = [float((found - right).norm() / right.norm()) for found in (plain, chunked)]
print("| relative error of the head's gradient, float32 | |\n|---|---|")
print(f"| torch, plain | {errors[0]:.2g} |\n| torch, chunked | {errors[1]:.2g} |")
raise SystemExit(int(errors[1] > 20 * errors[0]))
