# TRL 1.16: a tool's token, which the mask takes out, makes every gradient of GRPO NaN behind a finite loss
# the ratio of a masked token overflows (log-ratio above 88, at low temperatures), and infinity times mask 0 is NaN.
import torch
from setup_grpo import grpo
from setup_tiny import tiny

found = {}
for drift in (0.0, 100.0):
    trainer = grpo(tiny(), temperature=0.01, loss_type="grpo")
    ids = torch.tensor([[2, 3, 4, 5], [6, 7, 8, 9]])
    batch = dict(prompt_ids=ids[:, :1], prompt_mask=torch.ones(2, 1, dtype=torch.long), completion_ids=ids[:, 1:])
    batch |= dict(completion_mask=torch.ones(2, 3, dtype=torch.long), advantages=torch.tensor([1.0, -1.0]))
    batch["tool_mask"] = torch.tensor([[1, 0, 1], [1, 1, 1]])  # the middle token of the first was written by a tool
    logits = trainer.model(input_ids=ids).logits[:, :-1].detach() / 0.01
    old = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    old[0, 1] -= drift  # its log-prob was lower when the completion was scored
    trainer.current_gradient_accumulation_steps = 1
    loss = trainer._compute_loss(trainer.model, batch | {"old_per_token_logps": old})
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in trainer.model.parameters() if p.grad is not None]).norm()
    found[drift] = (float(loss), float(norm))
print("| log-ratio of the tool's token | loss | gradient norm |\n|---|---|---|")
for drift, (loss, norm) in found.items():
    print(f"| {drift:g} | {loss:.6g} | {norm:.6g} |")
right, wrong = found[0.0][1], found[100.0][1]
raise SystemExit(int(not abs(wrong - right) < 1e-3 * right))
