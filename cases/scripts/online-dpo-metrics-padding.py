# TRL 1.16: online DPO's logged KL and entropy count the padding behind a completion's end (the loss is right)
# training_step sums log-probs over every position of the padded batch for objective/kl and objective/entropy.
import torch
import transformers
from setup_online import online
from setup_tiny import tiny

policy, reference = tiny(0), tiny(1)
for model in (policy, reference):
    model.lm_head.weight.data *= 20  # completions that end at different places
names = ("objective/kl", "objective/entropy")
scored, right = [], []
trainer = online(
    policy, reference, max_new_tokens=12, per_device_train_batch_size=4, logging_strategy="steps", logging_steps=1
)
forward = trainer._forward


def recorded(model, prompt_ids, prompt_mask, completion_ids, completion_mask, *more):
    log_probs = forward(model, prompt_ids, prompt_mask, completion_ids, completion_mask, *more)
    scored.append(log_probs.detach() * completion_mask)
    if len(scored) == 2:
        own, other = scored
        right.append((float((own - other).sum(1).mean()), float(-own.sum(1).mean())))
        scored.clear()
    return log_probs


trainer._forward = recorded
torch.manual_seed(0)
trainer.remove_callback(transformers.PrinterCallback)  # its lines would stand above the table
trainer.train()
found = [[row[name] for name in names] for row in trainer.state.log_history if names[0] in row]
print("| step | logged KL | without padding | logged entropy | without padding |\n|---|---|---|---|---|")
for step, (a, b) in enumerate(zip(found, right)):
    print(f"| {step + 1} | {a[0]:.6g} | {b[0]:.6g} | {a[1]:.6g} | {b[1]:.6g} |")
raise SystemExit(int(any(abs(x - y) > 1e-3 for a, b in zip(found, right) for x, y in zip(a, b))))
