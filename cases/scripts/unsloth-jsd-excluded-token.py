# unsloth-zoo 2026.10.9: the distillation loss is NaN as soon as student and teacher exclude a token (logit -inf)
# F.kl_div(log_target=True) multiplies probability 0 by -inf - x; in a divergence 0·log 0 counts as 0.
from setup_unsloth import torch, unsloth


def divergence(size, beta):
    torch.manual_seed(0)
    hidden, weight, teacher = torch.randn(1, 1, 4), torch.randn(2, 4), torch.randn(2, 4)
    bias = torch.tensor([0.0, 0.0, -torch.inf])[:size]
    weight, teacher = (torch.cat([w, torch.zeros(1, 4)])[:size] for w in (weight, teacher))
    weight.requires_grad_()
    given = dict(beta=beta, student_lm_head_bias=bias, teacher_lm_head_bias=bias)
    mask = torch.ones(1, 1, dtype=torch.bool)
    value = unsloth.distillation_chunked_jsd(hidden.requires_grad_(), hidden.detach(), weight, teacher, mask, **given)[
        0
    ]
    value.backward()
    return value.item(), hidden.grad.norm().item()


print("| beta | loss | gradient norm | loss without the token | gradient norm without it |\n|---|---|---|---|---|")
wrong = False
for beta in (0.0, 0.5, 1.0):
    found, right = divergence(3, beta), divergence(2, beta)
    print(f"| {beta} | {found[0]:.6g} | {found[1]:.6g} | {right[0]:.6g} | {right[1]:.6g} |")
    wrong |= not all(abs(a - b) < 1e-5 for a, b in zip(found, right))
raise SystemExit(int(wrong))
