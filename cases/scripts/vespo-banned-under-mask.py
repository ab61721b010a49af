# liger-kernel 0.8.5 (TRL 1.16 likewise): a banned token under the mask makes the VESPO loss NaN and its sequence's gradient 0
# its log-ratio is -inf + inf = NaN; get_gamma_weights multiplies by the mask afterwards and turns the NaN into weight 0.
import torch
from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss
from setup_liger_grpo import ADVANTAGES, HIDDEN, IDS, MASK, WEIGHT

loss = LigerFusedLinearGRPOLoss(loss_type="vespo", beta=0.0, compiled=False, use_ref_model=False)
bias = torch.zeros(16)
bias[5] = -torch.inf
IDS[MASK.bool()] = IDS[MASK.bool()].where(IDS[MASK.bool()] != 5, 6)
found = {}
for name, token in (("allowed", 6), ("banned", 5)):
    hidden = HIDDEN.clone().requires_grad_()
    ids = IDS.where(MASK.bool(), token)  # what stands at padding
    value = loss(hidden, WEIGHT, ids, MASK, ADVANTAGES, bias)[0]
    value.backward()
    found[name] = (value.item(), hidden.grad[1, 0].norm().item())
print("| token at padding | loss | gradient norm of the padded sequence |\n|---|---|---|")
for name, (value, norm) in found.items():
    print(f"| {name} | {value:.6g} | {norm:.6g} |")
raise SystemExit(int(not all(abs(a - b) < 1e-5 for a, b in zip(*found.values()))))
