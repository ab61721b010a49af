# torch 2.13: the divergence of more than 65,504 nearly equal float16 logits is NaN on the CPU
# log_softmax holds the sum of exp(z - max) in the dtype of the logits, and float16 ends at 65,504: -inf minus -inf.
import torch
from trl.experimental.gkd import GKDTrainer

student, teacher = torch.zeros(1, 1, 70000, dtype=torch.float16), torch.zeros(1, 1, 70000, dtype=torch.float16)
teacher[..., 0] = 8
found = GKDTrainer.generalized_jsd_loss(student, teacher).item()
right = GKDTrainer.generalized_jsd_loss(student.double(), teacher.double()).item()
print("| JSD over 70,000 tokens | |\n|---|---|")
print(f"| float16 logits | {found:.6g} |\n| float64 | {right:.6g} |")
raise SystemExit(int(not abs(found - right) < 0.01))
