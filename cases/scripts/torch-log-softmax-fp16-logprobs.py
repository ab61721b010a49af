# torch 2.13: log_softmax of more than 65,504 nearly equal float16 logits is -inf throughout on the CPU
# the kernel holds the sum of exp(z - max) in the dtype of the logits, and float16 ends at 65,504.
import math

import torch
from trl.trainer.utils import selective_log_softmax

logits = torch.zeros(1, 70000, dtype=torch.float16)
found = float(logits.log_softmax(-1)[0, 0])
trl = float(selective_log_softmax(logits, torch.tensor([5])))
right = -math.log(70000)
print("| log-prob of one of 70,000 equal tokens | |\n|---|---|")
print(f"| torch, float16 | {found:.6g} |\n| TRL's selective_log_softmax | {trl:.6g} |\n| definition | {right:.6g} |")
raise SystemExit(int(not abs(found - right) < 0.01))
