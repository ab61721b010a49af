# TRL 1.16: a temperature in generation_kwargs, documented to override, reaches the sampling alone: log-probs and entropies of GRPO and
# RLOO keep that of the field, 1.0
# Log-probs of the sampled tokens in the loss, and those of the distribution that they were sampled from.

import torch
import transformers
from setup_grpo import grpo
from setup_tiny import tiny


def sampling(model, **more):
    trainer = grpo(model, max_steps=1, learning_rate=0.0, logging_strategy="no", **more)
    trainer.remove_callback(transformers.PrinterCallback)
    seen, score = [], trainer._get_per_token_logps_and_entropies

    def watched(*args, **kwargs):
        out = score(*args, **kwargs)
        seen.append((args[1].clone(), args[2].clone(), args[3], out[0].detach(), out[1].detach()))
        return out

    trainer._get_per_token_logps_and_entropies = watched
    torch.manual_seed(0)
    trainer.train()
    ids, mask, keep, logps, entropy = seen[-1]
    temperature = trainer.generation_config.temperature
    with torch.no_grad():
        logits = model.eval()(ids, attention_mask=mask).logits[:, -keep - 1 : -1] / temperature
    want = logits.log_softmax(-1)
    there = mask[:, -keep:].bool()
    tokens, spread = want.gather(-1, ids[:, -keep:, None])[..., 0], -(want.exp() * want).sum(-1)
    return temperature, *(x[there].mean() for x in (logps, tokens, entropy, spread))


def sharp():
    model = tiny()
    model.lm_head.weight.data *= 20
    return model


print("| setting | sampled at | mean log-prob of the loss | of the sampler | entropy logged | of the sampler |")
print("|---|---|---|---|---|---|")
bad = 0
for more in (dict(temperature=0.5), dict(generation_kwargs={"temperature": 0.5})):
    temperature, *values = sampling(sharp(), **more)
    bad += abs(values[0] - values[1]) > 1e-3
    print(f"| {more} | {temperature} | " + " | ".join(f"{v:.4f}" for v in values) + " |")
raise SystemExit(int(bad > 0))
