# TRL 1.16: the chunked divergence of DistillationTrainer is NaN as soon as a token is excluded (logit -inf)
# the tiles multiply probability 0 by an infinite difference of log-probs; in a divergence 0·log 0 counts as 0.
import torch
from trl.kernels.chunked_divergence import ChunkedDivergenceFunction


def divergence(size, beta):
    torch.manual_seed(0)
    hidden, weight, teacher = torch.randn(1, 4), torch.randn(2, 4), torch.randn(2, 4)
    excluded = torch.tensor([0.0, 0.0, -torch.inf])[:size]
    weight, teacher = (torch.cat([w, torch.zeros(1, 4)])[:size] for w in (weight, teacher))
    weight.requires_grad_()
    value = ChunkedDivergenceFunction.apply(hidden, weight, excluded, hidden, teacher, excluded, beta)[0].sum()
    value.backward()
    return value.item(), weight.grad.norm().item()


print("| beta | loss | gradient norm | loss without the token | gradient norm without it |\n|---|---|---|---|---|")
wrong = False
for beta in (0.0, 0.5, 1.0):
    found, right = divergence(3, beta), divergence(2, beta)
    print(f"| {beta} | {found[0]:.6g} | {found[1]:.6g} | {right[0]:.6g} | {right[1]:.6g} |")
    wrong |= not all(abs(a - b) < 1e-5 for a, b in zip(found, right))
raise SystemExit(int(wrong))
