# TRL 1.16: with completions of one token, GRPO's logged entropy counts masked completions too
# global_masked_mean takes a tensor of width 1 for one value a sequence and leaves the mask out.
import torch
import transformers
from setup_grpo import grpo
from setup_tiny import tiny

model = tiny()
head = torch.nn.Linear(16, 32)
head.weight = model.lm_head.weight
head.bias.data.zero_()
head.bias.data[1] = 3.5  # <eos>: about half of the completions end with it, the others are truncated and masked
model.lm_head = head
trainer = grpo(model, max_completion_length=1, mask_truncated_completions=True, per_device_train_batch_size=8)
seen, compute = [], trainer._compute_loss


def recorded(model, inputs):
    entropy = model(input_ids=torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)).logits[:, -2]
    entropy = torch.distributions.Categorical(logits=entropy.detach().double()).entropy()
    mask = inputs["completion_mask"][:, 0]
    seen.append((float((entropy * mask).sum() / mask.sum().clamp(min=1)), int(mask.sum())))
    return compute(model, inputs)


trainer._compute_loss = recorded
torch.manual_seed(0)
trainer.remove_callback(transformers.PrinterCallback)  # its lines would stand above the table
trainer.train()
found = [row["entropy"] for row in trainer.state.log_history if "entropy" in row]
print("| step | completions that count, of 8 | logged entropy | mean over those that count |\n|---|---|---|---|")
for step, (value, (right, count)) in enumerate(zip(found, seen)):
    print(f"| {step + 1} | {count} | {value:.6g} | {right:.6g} |")
raise SystemExit(int(any(abs(value - right) > 1e-3 for value, (right, _) in zip(found, seen))))
