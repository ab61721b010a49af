# TRL 1.16: DPO's alpha divergence has its coefficient exchanged with 1 - coefficient
# f-DPO (arXiv 2309.16240, table 1) has (1 - u^-a)/a, u = policy/reference; TRL computes (u^(a-1) - 1)/(a - 1).
import datasets
import torch
from setup_tiny import PAIRS, options, tiny, tokenizer
from trl import DPOConfig, DPOTrainer

A, BETA = 0.3, 0.1
kind = dict(f_divergence_type="alpha_divergence", f_alpha_divergence_coef=A, beta=BETA)
args = DPOConfig(**options(per_device_train_batch_size=4, max_steps=1, **kind))
policy, reference = tiny(0), tiny(1)
for model in (policy, reference):
    model.lm_head.weight.data *= 10  # log-ratios of a few nats
data = datasets.Dataset.from_list(PAIRS)
trainer = DPOTrainer(policy, ref_model=reference, args=args, train_dataset=data, processing_class=tokenizer)
batch = next(iter(trainer.get_train_dataloader()))
ids, mask = batch["input_ids"], batch["attention_mask"]
counted = batch["completion_mask"][:, 1:] * mask[:, 1:]


def log_probs(model):
    logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1].float()
    return (logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0] * counted).sum(-1)


def definition():
    u = (log_probs(policy) - log_probs(reference).detach()).exp()
    chosen, rejected = ((1 - u**-A) / A).chunk(2)
    return -torch.nn.functional.logsigmoid(BETA * (chosen - rejected)).mean()


def measured(loss):
    policy.zero_grad()
    loss.backward()
    return loss.item(), torch.stack([p.grad.norm() for p in policy.parameters()]).norm().item()


found, right = measured(trainer.compute_loss(trainer.model, batch)), measured(definition())
print(f"| f_alpha_divergence_coef={A} | loss | gradient norm |\n|---|---|---|")
for name, (loss, norm) in (("DPOTrainer", found), ("f-DPO", right)):
    print(f"| {name} | {loss:.6g} | {norm:.6g} |")
raise SystemExit(int(abs(found[1] - right[1]) > 1e-2 * right[1]))
