# TRL 1.16: SDPO takes a completion that no reward function scores (None) as one of reward 0
# GRPO leaves it out of its group: nansum "biases the per-group baseline and hands the completion a spurious advantage".
import torch
from setup_self import saved, sdpo
from setup_tiny import tiny

REWARDS = [1.0, 2.0, 3.0, None]
sizes = dict(per_device_train_batch_size=4, num_generations=4, distillation_weight=0.0)
trainer = sdpo(saved(tiny()), lambda completions, **_: REWARDS, **sizes)
trainer.model.train()
found = trainer._prepare_training_batch([{"prompt": "w2 w3"}] * 4)["advantages"].tolist()
scored = torch.tensor(REWARDS[:3])
right = [*((scored - scored.mean()) / (scored.std() + 1e-4)).tolist(), 0.0]
print("| reward | advantage | right |\n|---|---|---|")
for reward, a, b in zip(REWARDS, found, right):
    print(f"| {reward} | {a:.4f} | {b:.4f} |")
raise SystemExit(int(max(abs(a - b) for a, b in zip(found, right)) > 1e-3))
