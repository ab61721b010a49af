# unsloth-zoo 2026.10.9: UnslothEfficientGRPO in several chunks takes 1/n_chunks of the loss with loss_type="dapo"
# forward averages the chunks' losses, each already a sum divided by the tokens of the whole window.
from setup_unsloth import grpo, torch

new, mask = -torch.rand(4, 3), torch.ones(4, 3)
more = dict(loss_type="dapo", num_items_in_batch=12, current_gradient_accumulation_steps=1, steps_per_generation=1)
print("| chunks | gradient norm | of the whole batch |\n|---|---|---|")
right = grpo(new, new, mask, **more)[1].norm().item()
wrong = False
for chunks in (1, 2, 4):
    found = grpo(new, new, mask, chunks, **more)[1].norm().item()
    print(f"| {chunks} | {found:.6g} | {right:.6g} |")
    wrong |= abs(found / right - 1) > 1e-3
raise SystemExit(int(wrong))
