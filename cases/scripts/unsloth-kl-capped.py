# unsloth-zoo 2026.10.9: the KL term of a token stops at 10, and far from the reference it has no gradient
# grpo_compute_loss caps it on purpose; the definition, exp(d) - d - 1 with d = ref - policy, goes on growing.
from setup_unsloth import grpo, torch

print("| ref - policy, nats | KL gradient, Unsloth | definition |\n|---|---|---|")
wrong = False
more = dict(loss_type="grpo", current_gradient_accumulation_steps=1)
for distance in (1.0, 2.0, 3.0, 5.0):
    new, mask = torch.full((2, 1), -8.0), torch.ones(2, 1)
    with_kl, without = (grpo(new, new + distance, mask, beta=beta, **more)[1] for beta in (1.0, 0.0))
    found = float((with_kl - without)[0, 0]) * 2  # of one of two sequences
    right = 1 - torch.tensor(distance).exp().item()
    print(f"| {distance:g} | {found:.5g} | {right:.5g} |")
    wrong |= abs(found - right) > 1e-3 * abs(right)
raise SystemExit(int(wrong))
