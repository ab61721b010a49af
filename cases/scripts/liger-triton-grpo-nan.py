# liger-kernel 0.8.5: triton_grpo_loss returns a finite loss where a logit is NaN, and NaN gradients
# tl.clamp and tl.minimum return the operand that is a number: a ratio of NaN becomes a bound of the clip.
import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
from liger_kernel.transformers.grpo_loss import triton_grpo_loss

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
logits, ids = torch.randn(2, 5, 32, device=device), torch.randint(0, 32, (2, 4), device=device)
old, mask = torch.randn(2, 4, device=device), torch.ones(2, 4, dtype=torch.int32, device=device)
advantages = torch.tensor([1.0, -1.0], device=device)
logits[0, 1, 3] = torch.nan
given = logits.requires_grad_()
loss = triton_grpo_loss(given, old, None, ids, advantages, completion_mask=mask, beta=0.0, reduce=True)[0]
loss.backward()
lost = int(given.grad.isnan().any(-1).sum())
print("| one logit is NaN | |\n|---|---|")
print(f"| loss | {loss.item():.6g} |\n| positions with NaN gradients | {lost} |")
raise SystemExit(int(bool(loss.isfinite()) and lost > 0))
