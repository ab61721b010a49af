# liger-kernel 0.8.5: a second backward pass through LigerFusedLinearJSD multiplies twice by the upstream gradient
# fused_linear_jsd_backward multiplies the saved gradients in place (element_mul_kernel), and the next pass finds them so.
import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
from liger_kernel.transformers.fused_linear_jsd import LigerFusedLinearJSD

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
hidden = torch.randn(2, 4, device=device, requires_grad=True)
weight, teacher = torch.randn(8, 4, device=device), torch.randn(8, 4, device=device)
loss = 3 * LigerFusedLinearJSD()(hidden, weight, hidden.detach(), teacher, None)
norms = []
for _ in range(2):
    (gradient,) = torch.autograd.grad(loss, hidden, retain_graph=True)
    norms.append(gradient.norm().item())
print("| gradient of 3 times the loss | norm |\n|---|---|")
print(f"| first pass | {norms[0]:.6g} |\n| second pass | {norms[1]:.6g} |")
raise SystemExit(int(abs(norms[1] / norms[0] - 1) > 1e-3))
