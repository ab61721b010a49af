# liger-kernel 0.8.5: float16 loss scaling has no effect on LigerJSD, and small gradients vanish
# the kernel stores the gradient of the log-probs in their dtype in the forward pass, before the loss scale multiplies it.
import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
from liger_kernel.transformers.jsd import LigerJSD

SCALE = 32768.0  # the largest that float16 holds
torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
print("| tokens | gradient norm, LigerJSD | float64 | lost |\n|---|---|---|---|")
lost = []
for tokens in (16, 256):
    p, q = (torch.randn(tokens, 4096, device=device).log_softmax(-1).half() for _ in range(2))
    student = p.clone().requires_grad_()
    (SCALE * LigerJSD(beta=0.5)(student, q)).backward()
    found = student.grad.double() / SCALE
    exact = p.double().requires_grad_()
    m = torch.logaddexp(exact, q.double()) - torch.tensor(2.0).log()
    both = exact.exp() * (exact - m) + q.double().exp() * (q.double() - m)
    (0.5 * both.sum() / tokens).backward()
    lost.append(float((found - exact.grad).norm() / exact.grad.norm()))
    print(f"| {tokens} | {float(found.norm()):.5g} | {float(exact.grad.norm()):.5g} | {lost[-1]:.1%} |")
raise SystemExit(int(not max(lost) < 0.01))
