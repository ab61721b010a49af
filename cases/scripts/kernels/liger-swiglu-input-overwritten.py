# liger-kernel 0.8.5: the backward of SwiGLU and GEGLU writes gradients over gate and up, which other operations have saved
# the kernel writes past torch's version counter: a second use of the gate gets a wrong gradient, and a second backward too, in silence.
import torch
from setup_kernels import device, functional

gate, up = torch.randn(4, 8, device=device), torch.randn(4, 8, device=device)


def gradient(swiglu, dtype):
    g = gate.to(dtype).requires_grad_()
    doubled, other = g * 2, up.to(dtype)
    penalty = doubled.square().sum()  # saves the gate for its own backward
    y = swiglu(doubled, other)
    (penalty + y.sum()).backward()
    return g.grad.double()


exact = gradient(lambda a, b: torch.nn.functional.silu(a) * b, torch.float64)
found = gradient(functional.liger_swiglu, torch.float32)
error = float((found - exact).norm() / exact.norm())
print("| gradient of the gate of SwiGLU with a penalty on it | relative error |\n|---|---|")
print(f"| Liger | {error:.3g} |")
raise SystemExit(int(error > 1e-4))
