# TRL 1.16: distillation from a server: the gradient is 0 at beta=0.999 with bfloat16 logits
# _jsd_divergence puts beta into a tensor of the student's dtype, and 1 - beta keeps what is left: 0.999 is 1 there.
import torch
from trl.experimental.server_distillation.server_distillation_trainer import _jsd_divergence


def gradient(dtype, beta):
    torch.manual_seed(0)
    logits, teacher = torch.randn(4, 16).bfloat16(), torch.randn(4, 16).log_softmax(-1)
    logits = logits.to(dtype).requires_grad_()
    support = torch.ones(4, 16, dtype=torch.bool)
    _jsd_divergence(logits.log_softmax(-1), teacher.to(dtype), beta, support).sum().backward()
    return logits.grad.double().norm().item()


print("| beta | gradient norm, bfloat16 logits | the same in float64 | ratio |\n|---|---|---|---|")
wrong = False
for beta in (0.5, 0.9, 0.999):
    found, right = gradient(torch.bfloat16, beta), gradient(torch.float64, beta)
    print(f"| {beta} | {found:.4g} | {right:.4g} | {found / right:.3g} |")
    wrong |= abs(found / right - 1) > 0.1
raise SystemExit(int(wrong))
