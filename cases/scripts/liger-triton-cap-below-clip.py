# liger-kernel 0.8.5: triton_grpo_loss drops the gradient of ratios between delta and 1 + epsilon_high where the advantage is negative
# loss = -min(min(r, delta)·A, clip(r)·A): for A < 0 the clipped ratio counts, and inside its range it has a gradient.
import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
from liger_kernel.transformers.grpo_loss import triton_grpo_loss

LOW, HIGH = 0.2, 0.28
torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
logits = torch.randn(1, 4, 32, device=device)
ids = torch.randint(32, (1, 3), device=device)
ratios = torch.tensor([[0.9, 1.1, 1.2]], device=device)
logps = logits[:, :-1].log_softmax(-1).gather(-1, ids[..., None])[..., 0]
old, advantage = logps - ratios.log(), torch.tensor([-1.0], device=device)


def plain(x, delta):
    logp = x[:, :-1].log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    r = (logp - old.double()).exp()
    return -torch.min(r.clamp(max=delta) * advantage, r.clamp(1 - LOW, 1 + HIGH) * advantage).mean()


def liger(x, delta):
    given = dict(temperature=1.0, beta=0.0, eps_low=LOW, eps_high=HIGH, inplace=False, delta=delta, loss_type="grpo")
    return triton_grpo_loss(x, old, None, ids, advantage, torch.ones_like(ids), **given)[0].mean()


print("| delta | gradient norm, triton_grpo_loss | autograd in float64 | loss, and in float64 |\n|---|---|---|---|")
off = []
for delta in (1.5, 1.05):
    found, exact = logits.clone().requires_grad_(), logits.double().requires_grad_()
    a, b = liger(found, delta), plain(exact, delta)
    a.backward()
    b.backward()
    off.append(float((found.grad - exact.grad).norm() / exact.grad.norm()))
    print(f"| {delta} | {found.grad.norm():.4g} | {exact.grad.norm():.4g} | {a:.6g}, {b:.6g} |")
raise SystemExit(int(off[1] > 1e-3 > off[0]))
