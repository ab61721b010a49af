# TRL 1.16: online DPO with gradient accumulation takes a gradient that is too large by the number of micro-batches
# OnlineDPOTrainer.training_step hands the micro-batch's mean to accelerator.backward and divides only what it returns.
import math

import torch
import transformers
from setup_online import backward_passes, online
from setup_tiny import tiny

STEPS = 4
parts, norms = [], []


def gradient(loss):
    weights = [p for p in trainer.model.parameters() if p.requires_grad]
    whole = math.log(2) / loss.detach()  # the policy is its own reference: every loss is -log sigmoid(0)
    parts.append(torch.cat([(whole * g).flatten() for g in torch.autograd.grad(loss, weights, retain_graph=True)]))


class Keep(transformers.TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        summed = torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad])
        norms.append((float(summed.norm()), float(torch.stack(parts[-STEPS:]).mean(0).norm())))


trainer = online(tiny(), tiny(), callbacks=[Keep()], gradient_accumulation_steps=STEPS, max_steps=2)
backward_passes(trainer, gradient)
torch.manual_seed(0)
trainer.train()
print(f"| window of {STEPS} micro-batches | gradient norm, OnlineDPOTrainer | of the mean | ratio |\n|---|---|---|---|")
for window, (found, right) in enumerate(norms):
    print(f"| {window + 1} | {found:.5g} | {right:.5g} | {found / right:.3g} |")
raise SystemExit(int(any(abs(found / right - 1) > 1e-2 for found, right in norms)))
