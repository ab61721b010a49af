# liger-kernel 0.8.5: the fused GRPO loss times 0 has NaN gradients in float16
# gradients are taken in the forward pass, in float16; one that overflowed there becomes inf·0 = NaN.
from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss
from setup_liger_grpo import ADVANTAGES, HIDDEN, IDS, MASK, WEIGHT

loss = LigerFusedLinearGRPOLoss(beta=0.0, compiled=False, use_ref_model=False)
weight = (WEIGHT / 1000).half().requires_grad_()
(0 * loss((1000 * HIDDEN).half(), weight, IDS, MASK, 1000 * ADVANTAGES)[0]).backward()
wrong = int((weight.grad != 0).sum())
print("| gradient of 0 times the loss | entries that are not 0 |\n|---|---|")
print(f"| Liger, {int(weight.grad.isnan().sum())} of them NaN | {wrong} |\n| definition | 0 |")
raise SystemExit(int(wrong > 0))
