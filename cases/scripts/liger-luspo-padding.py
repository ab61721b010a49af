# liger-kernel 0.8.5: GRPO loss with loss_type="luspo" counts padding
# ppo_loss_fn averages over all B·T positions and leaves the mask out: what stands at padding enters loss and gradient.
import torch
from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss
from setup_liger_grpo import ADVANTAGES, HIDDEN, IDS, MASK, WEIGHT, B, log_probs


def liger(hidden, old):
    hidden, weight = hidden.clone().requires_grad_(), WEIGHT.clone().requires_grad_()
    loss = LigerFusedLinearGRPOLoss(loss_type="luspo", beta=0.0, compiled=False, use_ref_model=False)
    value = loss(hidden, weight, IDS, MASK, ADVANTAGES, old_per_token_logps=old)[0]
    value.backward()
    return value.item(), weight.grad.norm().item()


def definition(hidden, old):
    """The sum of a sequence's tokens, averaged over the sequences (Length-Unbiased Sequence Policy Optimization)."""
    weight = WEIGHT.double().requires_grad_()
    ratio = (log_probs(hidden.double(), weight) - old).exp()
    gain = torch.min(ratio * ADVANTAGES[:, None], ratio.clamp(0.8, 1.2) * ADVANTAGES[:, None])
    value = -(gain * MASK).sum() / B
    value.backward()
    return value.item(), weight.grad.norm().item()


old = log_probs(HIDDEN, WEIGHT) + 0.1 * torch.randn(IDS.shape)
other = torch.where(MASK.bool()[..., None], HIDDEN, 3 * HIDDEN)  # other hidden states at padding alone
wrong = False
print("| | loss | gradient norm |\n|---|---|---|")
for name, hidden in (("", HIDDEN), (", other padding", other)):
    found, right = liger(hidden, old), definition(hidden, old)
    print(f"| Liger{name} | {found[0]:.6g} | {found[1]:.6g} |\n| definition{name} | {right[0]:.6g} | {right[1]:.6g} |")
    wrong |= any(abs(a - b) > 1e-3 * abs(b) for a, b in zip(found, right))
raise SystemExit(int(wrong))
