# torch 2.13: the chunked linear_cross_entropy is NaN where a label is ignored and token 0 is banned (logit -inf)
# the loss of token 0, which stands for an ignored label, is multiplied by 0, and inf·0 is NaN.
import torch
from torch.nn import LinearCrossEntropyOptions
from torch.nn.functional import linear_cross_entropy

torch.manual_seed(0)
hidden, weight, labels = torch.randn(3, 4), torch.randn(7, 4), torch.tensor([1, -100, 2])
bias = torch.zeros(7)
bias[0] = -torch.inf
whole = linear_cross_entropy(hidden, weight, labels, linear_bias=bias)
chunked = linear_cross_entropy(hidden, weight, labels, linear_bias=bias, options=LinearCrossEntropyOptions())
print("| mean loss | |\n|---|---|")
print(f"| options=LinearCrossEntropyOptions() | {float(chunked):.6g} |\n| options=None | {float(whole):.6g} |")
raise SystemExit(int(not torch.allclose(chunked, whole)))
