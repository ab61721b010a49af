# TRL 1.16: GKD's divergence is NaN as soon as student and teacher exclude a token (logit -inf)
# F.kl_div(log_target=True) multiplies probability 0 by -inf - x; in a divergence 0·log 0 counts as 0.
import torch

try:
    from trl.experimental.gkd import GKDTrainer
except ImportError:  # trl 0.11 to 0.23
    from trl import GKDTrainer


print("| beta | loss | gradient | definition |\n|---|---|---|---|")
wrong = False
for beta in (0.0, 0.5, 1.0):
    student = torch.tensor([[[1.0, 0.0, -torch.inf]]], requires_grad=True)
    teacher = torch.tensor([[[0.0, 1.0, -torch.inf]]])
    found = GKDTrainer.generalized_jsd_loss(student, teacher, labels=torch.zeros(1, 1, dtype=torch.long), beta=beta)
    found.backward()
    both = student.detach()[..., :2].double()  # without the excluded token
    right = GKDTrainer.generalized_jsd_loss(both, teacher[..., :2].double(), beta=beta).item()
    print(f"| {beta} | {found.item():.6g} | {student.grad.flatten().tolist()} | {right:.6g} |")
    wrong |= not (abs(found.item() - right) < 1e-5 and bool(student.grad.isfinite().all()))
raise SystemExit(int(wrong))
