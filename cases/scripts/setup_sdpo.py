import torch
from setup_processes import step
from setup_self import saved, sdpo
from setup_tiny import tiny, tokenizer

PROMPTS = ["w2 w3", "w4 w5 w6"]
COMPLETIONS = [[7], [8, 9, 10, 11, 12], [12, 13], [14]]  # of two groups of two
REWARDS = [1.0, 0.0, 0.25, 0.5]
OWN = tokenizer(PROMPTS)["input_ids"]


def right(scale):
    """Loss and norm of the gradient of the window, a mean over its tokens, in float64."""
    model = tiny().double()
    total, tokens = 0.0, 0
    for i, completion in enumerate(COMPLETIONS):
        prompt = OWN[i // 2]
        ids = torch.tensor([prompt + completion])
        log_probs = model(ids).logits[0, :-1].log_softmax(-1)[len(prompt) - 1 :]
        own = log_probs[range(len(completion)), completion]
        group = torch.tensor(REWARDS[i // 2 * 2 :][:2]).double()
        advantage = (REWARDS[i] - group.mean()) / (group.std() + 1e-4 if scale else 1.0)
        total = total - (advantage * (own - own.detach()).exp()).sum()
        tokens += len(completion)
    loss = total / tokens
    loss.backward()
    return float(loss), sum(float(p.grad.square().sum()) for p in model.parameters()) ** 0.5


def found(batch, accumulation, **more):
    settings = dict(distillation_weight=0.0, epsilon=0.2) | more
    trainer = sdpo(
        saved(tiny()),
        lambda prompts, **_: REWARDS,
        PROMPTS,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulation,
        shuffle_dataset=False,
        **settings,
    )
    trainer._generate = lambda ids: (ids, COMPLETIONS)
    return step(trainer)
