# trl 1.16.0: the loss of CPOTrainer is NaN in float16 where the log-probs of completions add up to less than -65,504
# get_batch_logps adds in the dtype of the logits: both sums are -inf, and their difference is NaN.
from types import SimpleNamespace

import torch
from trl.experimental.cpo import CPOTrainer

logits, labels = torch.zeros(2, 7000, 2), torch.ones(2, 7000, dtype=torch.long)
logits[..., 1] = torch.tensor([-10.0, -11.0])[:, None]
trainer = SimpleNamespace(
    beta=0.1,
    label_smoothing=0.0,
    loss_type="sigmoid",
    accelerator=SimpleNamespace(device="cpu"),
    alpha=0.0,
    simpo_gamma=0.5,
)
losses = {}
for dtype in (torch.float16, torch.float64):
    chosen, rejected = CPOTrainer.get_batch_logps(logits.to(dtype), labels).chunk(2)
    losses[dtype] = float(CPOTrainer.cpo_loss(trainer, chosen, rejected)[0])
print("| CPO loss, 7,000 tokens of 10 and of 11 nats | |\n|---|---|")
print(f"| TRL, float16 | {losses[torch.float16]:.6g} |\n| definition | {losses[torch.float64]:.6g} |")
raise SystemExit(int(losses[torch.float16] != losses[torch.float16]))
