# liger-kernel 0.8.5: triton_grpo_loss reads advantages that are not contiguous from the memory beside them
# the kernel takes place b of the memory for row b; it asserts that the other tensors are contiguous, not these.
import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
from liger_kernel.transformers.grpo_loss import triton_grpo_loss

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
logits, ids = torch.randn(4, 7, 32, device=device), torch.randint(0, 32, (4, 6), device=device)
old, mask = torch.randn(4, 6, device=device), torch.ones(4, 6, dtype=torch.int32, device=device)
sliced = torch.tensor([1.0, -9.0, 2.0, -9.0, 3.0, -9.0, 4.0, -9.0], device=device)[::2]  # 1, 2, 3, 4
losses = []
for advantages in (sliced, sliced.contiguous()):
    given = logits.clone().requires_grad_()
    try:
        found = triton_grpo_loss(given, old, None, ids, advantages, completion_mask=mask, beta=0.0, reduce=True)
        losses.append(found[0].item())
    except AssertionError:  # refused, as the other tensors are
        raise SystemExit(0) from None
print("| advantages 1, 2, 3, 4 | loss |\n|---|---|")
print(f"| a slice of every second | {losses[0]:.6g} |\n| contiguous | {losses[1]:.6g} |")
raise SystemExit(int(abs(losses[0] - losses[1]) > 1e-3))
