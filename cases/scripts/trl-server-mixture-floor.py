# TRL 1.16: distillation from a server in float16: the gradient of a rare token is wrong
# _jsd_divergence floors the float32 mixture at the smallest normal float16, 6.1e-5, so that rarer tokens count as that.
import torch
from trl.experimental.server_distillation.server_distillation_trainer import _jsd_divergence


def gradient(dtype):
    student = torch.tensor([[-0.5, -13.0]]).to(dtype).requires_grad_()  # two supported tokens, the second rare
    teacher = torch.tensor([[-0.6, -14.0]]).to(torch.promote_types(dtype, torch.float32))
    _jsd_divergence(student, teacher, 0.5, torch.ones(1, 2, dtype=torch.bool)).sum().backward()
    return student.grad.flatten().tolist()


found, right = gradient(torch.float16), gradient(torch.float64)
print("| token | gradient, float16 student | the same in float64 |\n|---|---|---|")
for probability, a, b in zip(("0.6", "2.3e-6"), found, right):
    print(f"| of probability {probability} | {a:.4g} | {b:.4g} |")
raise SystemExit(int(abs(found[1] - right[1]) > 0.2 * abs(right[1])))
