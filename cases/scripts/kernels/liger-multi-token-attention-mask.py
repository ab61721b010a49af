# liger-kernel 0.8.5: multi-token attention looks into the future where scores are below -1e9, as those of a padding mask are
# the causal mask is -1e9 and not -inf: a query whose past has all been masked by finfo.min gives its weight to later keys.
import torch
from setup_kernels import device, functional

T = 6
scores = torch.randn(1, 1, T, T, device=device)
weight = torch.randn(1, 1, 3, 3, device=device)
future = torch.ones(T, T, dtype=torch.bool, device=device).triu(1)
print("| keys padded on the left | largest error of other rows |\n|---|---|")
wrong = []
for padding in (0, 2):
    masked = scores.clone()
    masked[..., :padding] = torch.finfo(torch.float32).min
    probs = masked.double().masked_fill(future, -torch.inf).softmax(-1)
    exact = torch.nn.functional.conv2d(probs, weight.double(), padding=1).masked_fill(future, 0.0)
    found = functional.liger_multi_token_attention(masked, weight, None, 1, 1)
    wrong.append(float((found - exact)[..., padding:, :].abs().max()))
    print(f"| {padding} | {wrong[-1]:.3g} |")
raise SystemExit(int(max(wrong) > 1e-4))
