# TRL 1.16: SDPO's policy loss of type dapo is a mean over each micro-batch, not over "the global accumulated batch" (SDPOConfig)
# It is divided by the micro-batch's tokens, then by the accumulation steps. scale_rewards="none" divides by 1.0001.
import torch
from setup_processes import step
from setup_self import saved, sdpo
from setup_tiny import tiny, tokenizer

PROMPTS = ["w2 w3", "w4 w5 w6"]
COMPLETIONS = [[7], [8, 9, 10, 11, 12], [12, 13], [14]]  # of two groups of two
REWARDS = [1.0, 0.0, 0.25, 0.5]
OWN = tokenizer(PROMPTS)["input_ids"]


def right(scale):
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


bad = 0
print("| setting | micro-batches | loss | right | gradient norm | right |\n|---|---|---|---|---|---|")
for name, more in (("dapo", {}), ("dapo, scale_rewards none", dict(scale_rewards="none"))):
    x, y = right(scale=not more)
    for batch, accumulation in ((4, 1), (2, 2), (1, 4)):
        a, b = found(batch, accumulation, **more)
        bad |= abs(b / y - 1) > 1e-3
        print(f"| {name} | {accumulation} of {batch} | {a:.6g} | {x:.6g} | {b:.6g} | {y:.6g} |", flush=True)
raise SystemExit(int(bad))
