# liger-kernel 0.8.5: the backward of rotary embedding overwrites the gradient that it is given, which others share
# autograd hands one tensor to both terms of a sum; rope rotates it in place, and the other term's gradient is rotated too.
import torch
from setup_kernels import device, functional

B, T, H, D = 1, 3, 2, 8
angles = torch.rand(B, T, D // 2, device=device).repeat(1, 1, 2)
upstream = torch.randn(B, T, H, D, device=device).transpose(1, 2)
q, k, bias = (torch.randn(B, T, H, D, device=device).transpose(1, 2).requires_grad_() for _ in range(3))
term = bias * 1.0  # made before the rotation, so that its backward comes after that of the rotation
rotated, _ = functional.liger_rope(q * 1.0, k * 1.0, angles.cos(), angles.sin())
(rotated + term).backward(upstream.clone())
error = float((bias.grad - upstream).norm() / upstream.norm())
print("| gradient of a term that is added to the rotated q | relative error |\n|---|---|")
print(f"| the upstream gradient | {error:.3g} |")
raise SystemExit(int(error > 1e-6))
