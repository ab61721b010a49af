# cut-cross-entropy 25.1.1: a NaN in the LM head is lost from the log-probs, and the gradient of every hidden state is NaN
# tl_logaddexp adds the blocks of the vocabulary by tl.minimum and tl.maximum, which drop a NaN: log 2 stands for a block.
from setup_cce import device, linear_cross_entropy, torch

hidden = torch.randn(2, 32, device=device).half().requires_grad_()
ids = torch.tensor([0, 1], device=device)
print("| vocabulary | weight[7, 0] | log-probs | gradient of hidden |\n|---|---|---|---|")
for vocabulary in 64, 1024:
    for value in 0.0, float("nan"):
        weight = torch.randn(vocabulary, 32, device=device, generator=torch.Generator(device).manual_seed(1)).half()
        weight[7, 0] = value
        logps = -linear_cross_entropy(hidden, weight.requires_grad_(), ids, reduction="none", impl="cce")
        (grad,) = torch.autograd.grad(logps.sum(), hidden)
        print(f"| {vocabulary:,} | {value} | {logps.tolist()} | {'NaN' if grad.isnan().any() else 'finite'} |")
raise SystemExit(not logps.isnan().all())
