# liger-kernel 0.8.5: a second backward pass through the fused MLP gives x, gate and up other gradients, in silence
# `dG, dU = G, U`: backward writes the gradients of gate and up over the activations that forward saved, past torch's version counter.
import inspect

import torch
from setup_kernels import device  # before triton

# isort: split
from liger_kernel.ops import mlp

if device == "cpu":  # one configuration each, and no demand for CUDA, for Triton's interpreter
    for kernel in vars(mlp).values():
        if hasattr(kernel, "configs"):
            kernel.configs = kernel.configs[:1]
    lines = inspect.getsource(mlp.LigerMLPFunction).splitlines()
    exec("\n".join(line for line in lines if "assert input.is_cuda" not in line), vars(mlp))
shapes = {"x": (1, 5, 64), "gate": (64, 64), "up": (64, 64), "down": (64, 64)}
inputs = {n: torch.randn(shape, device=device, requires_grad=True) for n, shape in shapes.items()}
loss = mlp.LigerMLPFunction.apply(*inputs.values()).sum()
first, second = (torch.autograd.grad(loss, list(inputs.values()), retain_graph=True) for _ in range(2))
errors = [float((b - a).norm() / a.norm()) for a, b in zip(first, second, strict=True)]
print("| gradient of | second pass against the first |\n|---|---|")
print("\n".join(f"| {name} | {error:.3g} |" for name, error in zip(inputs, errors, strict=True)))
raise SystemExit(int(max(errors) > 1e-4))
