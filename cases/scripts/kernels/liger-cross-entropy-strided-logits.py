# liger-kernel 0.8.5: the gradient of logits whose rows are not contiguous is the logits themselves
# the forward pass makes a contiguous copy, which asks for no gradient, so the kernel writes none; the backward returns the copy.
import torch
from setup_kernels import device, functional

values, target = torch.randn(4, 6, device=device), torch.tensor([0, 1, 2, 3], device=device)
exact = values.double().requires_grad_()
torch.nn.functional.cross_entropy(exact, target).backward()
layouts = {"contiguous": values.clone(), "transposed": values.T.contiguous().T}
layouts["a slice of every second"] = torch.stack([values, values], -1).flatten(1)[:, ::2]
print("| logits | gradient, norm | float64 | it is the logits |\n|---|---|---|---|")
wrong = []
for name, logits in layouts.items():
    logits = logits.detach().requires_grad_()
    functional.liger_cross_entropy(logits, target).backward()
    wrong.append(float((logits.grad.double() - exact.grad).norm()))
    print(f"| {name} | {logits.grad.norm():.4g} | {exact.grad.norm():.4g} | {torch.equal(logits.grad, values)} |")
raise SystemExit(int(max(wrong) > 1e-4))
