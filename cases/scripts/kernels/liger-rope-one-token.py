# liger-kernel 0.8.5: rotary embedding of one token a sequence rotates the wrong memory where batches are more than one
# rows are found by stride(1) of (B, T, heads, D), which any value of a dimension of size 1 may be: contiguous() leaves it as it is.
import torch
from setup_kernels import device, functional


def rotated(x, cos, sin):
    first, second = x.chunk(2, -1)
    return x * cos.unsqueeze(1) + torch.cat([-second, first], -1) * sin.unsqueeze(1)


print("| tokens | memory of q | largest error |\n|---|---|---|")
wrong = []
for tokens, memory in ((2, "(B, heads, T, D)"), (1, "(B, T, heads, D)"), (1, "(B, heads, T, D)")):
    q, k = torch.randn(2, 4, tokens, 8, device=device), torch.randn(2, 2, tokens, 8, device=device)
    angles = torch.rand(2, tokens, 4, device=device).repeat(1, 1, 2)
    cos, sin = angles.cos(), angles.sin()
    exact = rotated(q.double(), cos.double(), sin.double())
    if memory == "(B, T, heads, D)":  # as after q_proj(x).view(B, T, heads, D).transpose(1, 2)
        q = q.transpose(1, 2).flatten().view(2, tokens, 4, 8).transpose(1, 2)
        k = k.transpose(1, 2).flatten().view(2, tokens, 2, 8).transpose(1, 2)
    found, _ = functional.liger_rope(q.clone(), k.clone(), cos, sin)
    wrong.append(float((found - exact).abs().max()))
    print(f"| {tokens} | {memory} | {wrong[-1]:.3g} |")
raise SystemExit(int(max(wrong) > 1e-4))
