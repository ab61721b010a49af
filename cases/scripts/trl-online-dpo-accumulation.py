# TRL 1.16: online DPO with gradient accumulation takes a gradient that is too large by the number of micro-batches
# OnlineDPOTrainer.training_step hands the micro-batch's mean to accelerator.backward and divides only what it returns.
import torch
from setup_online import backward_passes, online
from setup_tiny import tiny

STEPS = 4
handed = []
trainer = online(tiny(), tiny(), gradient_accumulation_steps=STEPS, max_steps=1)
backward_passes(trainer, lambda loss: handed.append(float(loss.detach())))
torch.manual_seed(0)
trainer.train()
found, right = sum(handed[-STEPS:]), 0.6931471805599453  # the policy is its own reference: -log sigmoid(0)
print("| loss of window 1, whose gradient is taken | |\n|---|---|")
print(f"| OnlineDPOTrainer, {STEPS} micro-batches | {found:.6g} |\n| mean over the window | {right:.6g} |")
print(f"the gradient is {found / right:.3g} times that of the window")
raise SystemExit(int(abs(found / right - 1) > 1e-2))
