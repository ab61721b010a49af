# liger-kernel 0.8.5: float16 loss scaling has no effect on the fused JSD loss, and small gradients vanish
# gradients are taken in the forward pass, in float16 and before the loss scale multiplies them: what underflows is lost.
import torch
from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

SCALE = 65536.0
torch.manual_seed(0)
torch.set_num_threads(1)
loss = LigerFusedLinearJSDLoss(weight_hard_loss=0.0, weight_soft_loss=1.0, beta=0.0, compiled=False)
print("| tokens | gradient norm, Liger | float64 | lost |\n|---|---|---|---|")
lost = []
for tokens in (128, 1024, 8192):
    states, head = torch.randn(tokens, 16).half(), torch.randn(64, 16).half()
    other = (head + 0.01 * torch.randn(64, 16)).half()  # a student that is nearly its teacher
    hidden = states.clone().requires_grad_()
    value = loss(hidden, head, states, other, torch.zeros(tokens, dtype=torch.long))
    (SCALE * value).backward()
    found = hidden.grad.double() / SCALE
    exact = states.double().requires_grad_()
    p, q = (exact @ head.double().T).log_softmax(-1), (states.double() @ other.double().T).log_softmax(-1)
    torch.nn.functional.kl_div(p, q, log_target=True, reduction="batchmean").backward()
    lost.append(float((found - exact.grad).norm() / exact.grad.norm()))
    print(f"| {tokens:,} | {float(found.norm()):.5g} | {float(exact.grad.norm()):.5g} | {lost[-1]:.1%} |")
raise SystemExit(int(not max(lost) < 0.1))
