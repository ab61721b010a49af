# liger-kernel 0.8.5: a second backward pass through vocab-parallel cross entropy takes the first one's gradient for exp(z - max)
# the backward kernel writes the gradient over the exponentials that the forward pass saved, and returns them: the first gradient changes too.
import torch
from setup_kernels import device  # before triton

# isort: split
from liger_kernel.transformers.vocab_parallel_cross_entropy import LigerVocabParallelCrossEntropy

logits = torch.randn(3, 2, 8, device=device, requires_grad=True)
loss = LigerVocabParallelCrossEntropy()(logits, torch.zeros(3, 2, dtype=torch.int64, device=device)).sum()
first, second = (torch.autograd.grad(loss, logits, retain_graph=True)[0].clone() for _ in range(2))
error = float((second - first).norm() / first.norm())
print("| gradient | norm |\n|---|---|")
print(f"| first pass | {float(first.norm()):.6g} |\n| second pass | {float(second.norm()):.6g} |")
raise SystemExit(int(error > 1e-4))
