# liger-kernel 0.8.5: the log-prob of a token is NaN where another token is banned (logit -inf)
# a chunk of 4,096 tokens that does not hold the target multiplies one of its logits by 0, and -inf·0 is NaN.
import torch
from liger_kernel.chunked_loss.fused_linear_ppo import LigerFusedLinearPPOBase

torch.manual_seed(0)
hidden, weight, ids = torch.randn(1, 3, 8), torch.randn(5000, 8), torch.tensor([[7, 8, 9]])
bias = torch.zeros(5000)
bias[4096] = -torch.inf
found = LigerFusedLinearPPOBase.chunk_forward(hidden, weight, ids, bias=bias)
logits = hidden.double() @ weight.double().T + bias
right = logits.log_softmax(-1).gather(-1, ids[..., None])[..., 0]
print("| log-prob of | Liger | definition |\n|---|---|---|")
for number in range(3):
    print(f"| token {number + 1} | {float(found[0, number]):.6g} | {float(right[0, number]):.6g} |")
raise SystemExit(int(not torch.allclose(found.double(), right, atol=1e-4)))
