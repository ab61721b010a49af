# TRL 1.16: GKD's gradient is 1.17 times too large at beta=0.99 and 0 at beta=0.999 with bfloat16 logits
# generalized_jsd_loss puts beta into a tensor of the logits' dtype, and 1 - beta keeps what is left: 0.999 is 1 there.
import torch

try:
    from trl.experimental.gkd import GKDTrainer
except ImportError:  # trl 0.11 to 0.23
    from trl import GKDTrainer


def gradient(dtype, beta):
    torch.manual_seed(0)
    student, teacher = torch.randn(1, 4, 16).bfloat16(), torch.randn(1, 4, 16).bfloat16()
    student = student.to(dtype).requires_grad_()
    GKDTrainer.generalized_jsd_loss(student, teacher.to(dtype), beta=beta).backward()
    return student.grad.double().norm().item()


print("| beta | gradient norm, bfloat16 logits | the same in float64 | ratio |\n|---|---|---|---|")
wrong = False
for beta in (0.5, 0.9, 0.99, 0.999):
    found, right = gradient(torch.bfloat16, beta), gradient(torch.float64, beta)
    print(f"| {beta} | {found:.4g} | {right:.4g} | {found / right:.3g} |")
    wrong |= abs(found / right - 1) > 0.1
raise SystemExit(int(wrong))
