# TRL 1.16 and liger-kernel 0.8.5: the JSD loss of a few thousand tokens is infinite in float16
# the divergence is summed over all tokens in float16 before it is divided by their number; float16 ends at 65,504.
import torch
from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss
from trl.experimental.gkd import GKDTrainer

TOKENS = 2048
hidden = torch.ones(TOKENS, 1, dtype=torch.float16)
student, teacher = torch.tensor([[0.0], [-80.0]]).half(), torch.tensor([[-80.0], [0.0]]).half()
logits, wanted = hidden @ student.T, hidden @ teacher.T
labels = torch.zeros(TOKENS, dtype=torch.long)
trl = GKDTrainer.generalized_jsd_loss(logits[None], wanted[None], labels=labels[None], beta=0.0)
loss = LigerFusedLinearJSDLoss(weight_hard_loss=0.0, weight_soft_loss=1.0, beta=0.0, compiled=False)
liger = loss(hidden, student, hidden, teacher, labels)
right = GKDTrainer.generalized_jsd_loss(logits[None].double(), wanted[None].double(), beta=0.0).item() / TOKENS
print(f"| forward KL of {TOKENS:,} tokens | loss |\n|---|---|\n| TRL, float16 | {trl.item():.6g} |")
print(f"| Liger, float16 | {liger.item():.6g} |\n| float64 | {right:.6g} |")
raise SystemExit(int(not all(abs(x.item() - right) < 0.01 * right for x in (trl, liger))))
