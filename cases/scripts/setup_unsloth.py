import os

for name in ("UNSLOTH_IS_PRESENT", "UNSLOTH_ALLOW_CPU", "UNSLOTH_COMPILE_DISABLE"):
    os.environ.setdefault(name, "1")
import torch
import unsloth_zoo.rl_replacements as unsloth

torch.manual_seed(0)
torch.set_num_threads(1)


def grpo(new, ref, mask, chunks=None, beta=0.0, **options):
    """Loss and gradient of log-probs by Unsloth's GRPO loss, whole or in chunks, with advantages 1, -1, 1, ..."""
    ids, advantages = torch.zeros(new.shape, dtype=torch.long), (-1.0) ** torch.arange(len(new))
    new = new.clone().requires_grad_()
    if chunks is None:
        value = unsloth.grpo_compute_loss(ref, new, new.detach(), None, ids, mask, beta, advantages, **options)[0]
    else:
        arguments = (torch.zeros(2, 1), ids, mask, advantages, beta, None, chunks, options)
        value = unsloth.UnslothEfficientGRPO.apply(new, new.detach(), ref, None, *arguments)[0]
    value.sum().backward()
    return value.sum().item(), new.grad
