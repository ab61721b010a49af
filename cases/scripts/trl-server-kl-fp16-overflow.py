# TRL 1.16: distillation from a server in float16: no gradient where a log-prob is below -65,504
# _jsd_divergence turns the term of such a token, which is infinite, into 65,504 by nan_to_num, whose gradient is 0.
import torch
from trl.experimental.server_distillation.server_distillation_trainer import _jsd_divergence


def gradient(dtype, nats):
    student = torch.tensor([[nats / 2, -nats / 2, 0.0]], dtype=dtype, requires_grad=True)
    teacher = torch.tensor([[-14.0, -1e-3, -7.0]]).log_softmax(-1).to(dtype)
    _jsd_divergence(student.log_softmax(-1), teacher, 0, torch.ones(1, 3, dtype=torch.bool)).sum().backward()
    return student.grad.double().norm().item()


print("| log-prob of the teacher's token | gradient norm in float16 | in float64 |\n|---|---|---|")
wrong = False
for nats in (1000.0, 60000.0, 80000.0):
    found, right = gradient(torch.float16, nats), gradient(torch.float64, nats)
    print(f"| {-nats:,.0f} | {found:.4g} | {right:.4g} |")
    wrong |= abs(found / right - 1) > 0.1
raise SystemExit(int(wrong))
