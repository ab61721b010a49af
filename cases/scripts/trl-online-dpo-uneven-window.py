# TRL 1.16: the last, smaller micro-batch of an online DPO window weighs as much as a full one
# the loss is a mean over the micro-batch, whatever its size, and the window sums these means.
import math

import torch
import transformers
from setup_online import backward_passes, online
from setup_tiny import tiny

parts, losses, summed = [], [], []


def gradient(loss):
    weights = [p for p in trainer.model.parameters() if p.requires_grad]
    parts.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, weights, retain_graph=True)]))
    losses.append(loss.item())


class Keep(transformers.TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        summed.append(torch.cat([p.grad.flatten().clone() for p in model.parameters()]))


# Policy and reference are one model: the loss of each prompt is log 2, and a micro-batch's loss its weight times that.
trainer = online(tiny(), tiny(), 3, [Keep()], gradient_accumulation_steps=2, max_steps=1)
backward_passes(trainer, gradient)
torch.manual_seed(0)
trainer.remove_callback(transformers.PrinterCallback)  # its lines would stand above the table
trainer.train()
taken = torch.linalg.lstsq(torch.stack(parts, 1).double(), summed[0].double()[:, None]).solution[:, 0]
weights = taken * torch.tensor(losses) / math.log(2)
each = [float(weights[0] / weights.sum()) / 2, float(weights[1] / weights.sum())]
print("| weight of a prompt in the window's gradient | |\n|---|---|")
print(
    f"| each of the first two, one micro-batch | {each[0]:.4g} |\n| the third, a micro-batch of its own | {each[1]:.4g} |"
)
raise SystemExit(int(abs(each[0] - each[1]) > 1e-3))
