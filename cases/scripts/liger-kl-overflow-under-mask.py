# liger-kernel 0.8.5: a padded token makes loss and gradient of the GRPO loss NaN where beta is not 0
# padding is scored too and multiplied by the mask afterwards: exp(reference - policy) overflows there, and inf·0 is NaN.
from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss
from setup_liger_grpo import ADVANTAGES, HIDDEN, IDS, MASK, WEIGHT, log_probs

loss = LigerFusedLinearGRPOLoss(beta=0.04, compiled=False)
found = {}
for drift in (0.0, 100.0):
    reference = log_probs(HIDDEN, WEIGHT) + drift * (1 - MASK)  # differs from the policy at padding alone
    weight = WEIGHT.clone().requires_grad_()
    value = loss(HIDDEN, weight, IDS, MASK, ADVANTAGES, ref_per_token_logps=reference)[0]
    value.backward()
    found[drift] = (float(value.detach()), float(weight.grad.norm()))
print("| log-ratio of the padded tokens | loss | gradient norm |\n|---|---|---|")
for drift, (value, norm) in found.items():
    print(f"| {drift:g} | {value:.6g} | {norm:.6g} |")
raise SystemExit(int(not abs(found[100.0][1] - found[0.0][1]) < 1e-4))
