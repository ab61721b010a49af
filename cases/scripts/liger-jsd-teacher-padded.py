# liger-kernel 0.8.5: a student with a smaller vocabulary than its teacher's gives probability to tokens that it lacks
# its logits are padded with 0, a logit like any other; TRL's GKDTrainer leaves the teacher's additional tokens out.
import torch
from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

torch.manual_seed(0)
hidden, teacher = torch.randn(4, 8), torch.randn(5, 8)
labels = torch.zeros(4, dtype=torch.long)


def loss(rows):
    student = torch.randn(4, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()
    call = LigerFusedLinearJSDLoss(weight_hard_loss=0.0, weight_soft_loss=1.0, compiled=False)
    value = call(hidden, student, hidden, teacher[:rows], labels)
    value.backward()
    return value.item(), student.grad.norm().item()


found, right = loss(5), loss(4)
print("| vocabulary of the student 4, of the teacher 5 | loss | gradient norm |\n|---|---|---|")
print(f"| Liger, student padded with logit 0 | {found[0]:.6g} | {found[1]:.6g} |")
print(f"| teacher cut to 4 | {right[0]:.6g} | {right[1]:.6g} |")
raise SystemExit(int(abs(found[0] - right[0]) > 1e-3 * right[0]))
