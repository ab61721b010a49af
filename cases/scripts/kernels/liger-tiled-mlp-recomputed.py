# liger-kernel 0.8.5: the backward of a tiled MLP computes the forward again with other dropout, and without its autocast
# torch.utils.checkpoint keeps the state of random numbers and autocast for this; LigerTiledMLPFunction keeps neither.
import torch
from setup_kernels import device  # before triton

# isort: split
from liger_kernel.ops.tiled_mlp import apply_tiled_mlp

linear = torch.nn.Linear(16, 16, bias=False).to(device)
x = torch.randn(1, 6, 16, device=device, requires_grad=True)
y = apply_tiled_mlp(lambda module, x: torch.nn.functional.dropout(module(x), 0.5), linear, x, 2)
y.sum().backward()
exact = torch.einsum("bto,bti->oi", (y != 0) * 2.0, x.detach())
error = float((linear.weight.grad - exact).norm() / exact.norm())
with torch.autocast(device, torch.bfloat16):
    loss = apply_tiled_mlp(lambda module, x: module(x), linear, linear(x), 2).sum()
try:
    loss.backward()
    under = "right"
except RuntimeError as failure:
    under = str(failure).partition("\n")[0]
print("| backward of a tiled layer | what comes |\n|---|---|")
print(
    f"| with dropout: relative error of the weight's gradient | {error:.3g} |\n| of a forward under autocast | {under} |"
)
raise SystemExit(int(error > 1e-4 or under != "right"))
