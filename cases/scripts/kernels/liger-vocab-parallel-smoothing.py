# liger-kernel 0.8.5: vocab-parallel cross entropy with label smoothing is infinite where a logit is 110 below the largest
# log p is log(exp(z - max)) - log Σ: the exponential is 0 in float32, and its log -inf. The log-probability itself is z - max - log Σ.
import torch
from setup_kernels import device  # before triton

# isort: split
from liger_kernel.transformers.vocab_parallel_cross_entropy import LigerVocabParallelCrossEntropy

target = torch.tensor([[0]], device=device)
print("| lowest logit, of a largest one of 0 | Liger | float64 |\n|---|---|---|")
wrong = False
for lowest in (-50.0, -100.0, -110.0):
    logits = torch.tensor([[[0.0, -1.0, lowest]]], device=device)
    found = float(LigerVocabParallelCrossEntropy(label_smoothing=0.1)(logits, target))
    exact = float(torch.nn.functional.cross_entropy(logits[0].double(), target[0], label_smoothing=0.1))
    print(f"| {lowest:g} | {found:.6g} | {exact:.6g} |")
    wrong |= not abs(found - exact) < 1e-4
raise SystemExit(int(wrong))
