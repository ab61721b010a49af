# liger-kernel 0.8.5: an evaluation sets the logits of ignored tokens to 0
# the kernel writes zeros to such rows before it looks whether a gradient is asked for; other rows stay.
import torch
from setup_kernels import device, functional

logits, target = torch.randn(4, 6, device=device), torch.tensor([0, -100, 2, -100], device=device)
before = logits.clone()
with torch.no_grad():
    functional.liger_cross_entropy(logits, target)
print("| token | target | its logits after the loss |\n|---|---|---|")
changed = []
for token, (row, kept) in enumerate(zip(logits, before, strict=True)):
    changed.append(not torch.equal(row, kept))
    print(f"| {token} | {int(target[token])} | {'all 0' if changed[-1] else 'unchanged'} |")
raise SystemExit(int(any(changed)))
