# liger-kernel 0.8.5: float16 loss scaling has no effect on the fused GRPO loss, and small gradients vanish
# gradients are taken in the forward pass, in float16 and before the loss scale multiplies them: what underflows is lost.
from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss
from setup_liger_grpo import ADVANTAGES, HIDDEN, IDS, MASK, WEIGHT, log_probs

SCALE = 65536.0
IDS[:] = (HIDDEN @ WEIGHT.T).argmax(-1)  # likely tokens, as a trained model samples them
loss = LigerFusedLinearGRPOLoss(beta=0.0, loss_type="dapo", compiled=False, use_ref_model=False)
print("| tokens in the batch | gradient norm, Liger | definition | lost |\n|---|---|---|---|")
lost = []
for tokens in (10_000, 100_000, 1_000_000):
    hidden, weight = HIDDEN.half().requires_grad_(), WEIGHT.half().requires_grad_()
    value = loss(hidden, weight, IDS, MASK, ADVANTAGES, num_items_in_batch=tokens)[0]
    (SCALE * value).backward()
    found = weight.grad.double() / SCALE
    exact = WEIGHT.half().double().requires_grad_()
    logps = log_probs(HIDDEN.half().double(), exact)
    (-((logps - logps.detach()).exp() * ADVANTAGES[:, None] * MASK).sum() / tokens).backward()
    lost.append(float((found - exact.grad).norm() / exact.grad.norm()))
    print(f"| {tokens:,} | {float(found.norm()):.5g} | {float(exact.grad.norm()):.5g} | {lost[-1]:.1%} |")
raise SystemExit(int(not max(lost) < 0.01))
