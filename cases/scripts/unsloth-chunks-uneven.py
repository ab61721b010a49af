# unsloth-zoo 2026.10.9: UnslothEfficientGRPO with 4 chunks of 3 sequences takes 3/4 of the loss
# torch.chunk makes 3 chunks of them, and the sum of their means is divided by n_chunks all the same.
from setup_unsloth import grpo, torch

new, mask = -torch.rand(3, 3), torch.ones(3, 3)
more = dict(loss_type="grpo", current_gradient_accumulation_steps=1)
found, right = grpo(new, new, mask, 4, **more), grpo(new, new, mask, **more)
norms = found[1].norm().item(), right[1].norm().item()
print("| 3 sequences | loss | gradient norm |\n|---|---|---|")
print(f"| in 4 chunks | {found[0]:.6g} | {norms[0]:.6g} |\n| as a whole | {right[0]:.6g} | {norms[1]:.6g} |")
raise SystemExit(int(abs(norms[0] / norms[1] - 1) > 1e-3))
