# liger-kernel 0.8.5: LigerFusedLinearJSD scales the gradient of a transposed head at wrong places
# element_mul_kernel takes a row of the saved gradient for contiguous, and torch.zeros_like gave it the strides of the head.
import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
from liger_kernel.transformers.fused_linear_jsd import LigerFusedLinearJSD

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
hidden, teacher = torch.randn(2, 4, device=device), torch.randn(8, 4, device=device)
stored = torch.randn(4, 8, device=device)
norms = []
print("| head | gradient of 3 times the loss over that of the loss |\n|---|---|")
for name, head in (("contiguous", stored.T.contiguous()), ("transposed", stored.T)):
    gradients = []
    for factor in (1, 3):
        weight = head.detach().requires_grad_()
        loss = LigerFusedLinearJSD()(hidden.requires_grad_(), weight, hidden.detach(), teacher, None)
        gradients += torch.autograd.grad(factor * loss, weight)
    ratio = gradients[1] / gradients[0]
    print(f"| {name} | {ratio.min().item():.3g} to {ratio.max().item():.3g} |")
raise SystemExit(int(float((ratio - 3).abs().max()) > 1e-3))
