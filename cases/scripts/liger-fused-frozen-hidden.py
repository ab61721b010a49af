# liger-kernel 0.8.5: the fused linear cross entropy gives an LM head no gradient where the hidden states ask for none
# all gradients are taken in the forward pass, and only where the hidden states require one: a frozen body with a trained head learns nothing.
import os

import torch

device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
from liger_kernel.transformers import functional

torch.manual_seed(0)
hidden, head = torch.randn(8, 16, device=device), torch.randn(32, 16, device=device)
target = torch.arange(8, device=device)
print("| hidden states | gradient of the head, norm | plain cross entropy |\n|---|---|---|")
norms = []
for trained in (True, False):
    weight, plain = head.clone().requires_grad_(), head.clone().requires_grad_()
    functional.liger_fused_linear_cross_entropy(hidden.clone().requires_grad_(trained), weight, target).backward()
    torch.nn.functional.cross_entropy(hidden @ plain.T, target).backward()
    norms.append(0.0 if weight.grad is None else float(weight.grad.norm()))
    print(
        f"| {'require a gradient' if trained else 'frozen'} | {weight.grad if weight.grad is None else f'{norms[-1]:.4g}'} | {plain.grad.norm():.4g} |"
    )
raise SystemExit(int(abs(norms[1] - norms[0]) > 1e-4))
