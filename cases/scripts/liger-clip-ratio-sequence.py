# liger-kernel 0.8.5: at importance_sampling_level="sequence" the logged clip ratio weighs long sequences more
# ppo_loss_fn spreads a clipped sequence over its tokens (is_clipped.expand_as(attention_mask)) instead of counting it once.
from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss
from setup_liger_grpo import ADVANTAGES, HIDDEN, IDS, MASK, WEIGHT, log_probs

old = log_probs(HIDDEN, WEIGHT)
old[0] -= 1.0  # the first sequence, of 4 tokens, is clipped; the second, of 1 token, is not
loss = LigerFusedLinearGRPOLoss(beta=0.0, compiled=False, use_ref_model=False, importance_sampling_level="sequence")
found = float(loss(HIDDEN, WEIGHT, IDS, MASK, ADVANTAGES, old_per_token_logps=old)[1][-1])
print(f"| clip ratio, 1 of 2 sequences clipped | |\n|---|---|\n| Liger | {found:.6g} |\n| sequences | 0.5 |")
raise SystemExit(int(abs(found - 0.5) > 1e-6))
