"""TPO's loss on the gold response: a mean of each micro-batch alone, against the mean over the window's tokens (float64)."""

import datasets
import torch
from setup_processes import step
from setup_tiny import options, tiny, tokenizer
from trl.experimental.tpo import TPOConfig, TPOTrainer

ROWS = [
    {"prompt": "w2 w3", "chosen": " w4 w5 w6", "rejected": " w7 w8", "reference": " w4"},
    {"prompt": "w9 w10", "chosen": " w11", "rejected": " w12 w13 w14", "reference": " w15 w16 w17 w18 w19 w20 w21"},
    {"prompt": "w15", "chosen": " w16 w17", "rejected": " w18", "reference": " w22 w23"},
    {"prompt": "w20 w21", "chosen": " w22 w23 w24 w25", "rejected": " w26 w27", "reference": " w24"},
]


def right(alpha, beta):
    model = tiny().double()
    chosen, nll, tokens = 0.0, 0.0, 0
    for row in ROWS:
        prompt = tokenizer(row["prompt"])["input_ids"]
        sums = {}
        for name in ("chosen", "rejected", "reference"):
            ids = tokenizer(row["prompt"] + row[name] + "<eos>")["input_ids"]
            log_probs = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
            own = log_probs.gather(-1, torch.tensor(ids[1:])[:, None])[len(prompt) - 1 :, 0]
            sums[name] = own.sum()
            if name == "reference":
                nll, tokens = nll - own.sum(), tokens + len(own)
        chosen = chosen - torch.nn.functional.logsigmoid(beta * (sums["chosen"] - sums["rejected"])) / len(ROWS)
    loss = chosen + alpha * nll / tokens
    loss.backward()
    return float(loss), sum(float(p.grad.square().sum()) for p in model.parameters()) ** 0.5


def found(batch, accumulation):
    args = TPOConfig(
        **options(per_device_train_batch_size=batch, gradient_accumulation_steps=accumulation, max_steps=1)
    )
    trainer = TPOTrainer(tiny(), args=args, train_dataset=datasets.Dataset.from_list(ROWS), processing_class=tokenizer)
    loss, gradient = step(trainer)
    return loss / accumulation, gradient


args = TPOConfig(**options())
bad, (x, y) = 0, right(args.tpo_alpha, args.beta)
print("| micro-batches | loss | right | gradient norm | right |\n|---|---|---|---|---|")
for batch, accumulation in ((4, 1), (2, 2), (1, 4)):
    a, b = found(batch, accumulation)
    bad |= abs(b / y - 1) > 1e-3
    print(f"| {accumulation} of {batch} | {a:.6g} | {x:.6g} | {b:.6g} | {y:.6g} |")
raise SystemExit(int(bad))
