"""AsyncDistillationTrainer's loss depends on how a window is cut into micro-batches. Rollouts come from a list."""

import types

import datasets
import numpy as np
import torch
from setup_processes import step
from setup_rollouts import LENGTHS, Nobody, Rollouts
from setup_tiny import options, tiny, tokenizer
from trl.experimental.async_distillation import (
    AsyncDistillationConfig,
    AsyncDistillationTrainer,
    async_distillation_trainer,
)

async_distillation_trainer.get_peak_flops_per_device = lambda *args: None
async_distillation_trainer.compute_flops_per_token = lambda *args: 1.0
K = 4


def sample(i):
    n = LENGTHS[i]
    return [2 + i, *range(10 + i, 10 + i + n)], n


def taught(ids):
    """The teacher's four likeliest tokens of each position (and the token itself)."""
    with torch.no_grad():
        log_probs = tiny(1)(torch.tensor([ids])).logits[0].log_softmax(-1)
    top = torch.full((len(ids), K + 1), -1)
    values = torch.full((len(ids), K + 1), -torch.inf)
    for t in range(1, len(ids)):
        own = log_probs[t - 1].topk(K).indices.tolist()
        own += [ids[t]] * (ids[t] not in own)
        top[t, : len(own)] = torch.tensor(own)
        values[t, : len(own)] = log_probs[t - 1, own]
    return top.numpy(), values.numpy()


def rollout(i):
    ids, n = sample(i)
    top, values = taught(ids)
    return types.SimpleNamespace(
        input_ids=np.array(ids),
        completion_mask=(np.arange(n + 1) > 0).astype("i8"),
        teacher_topk_ids=top,
        teacher_topk_logprobs=values,
        teacher_id="default",
        prompt_id=i,
        model_version=0,
        metrics={},
        enqueued_at=None,
    )


def right():
    """Mean over the window's tokens of KL(teacher || student) on the candidates and a bucket of the rest."""
    model, terms = tiny().double(), []
    for i in range(4):
        ids, _ = sample(i)
        top, values = (torch.tensor(x) for x in taught(ids))
        own = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        for t in range(1, len(ids)):
            kept = top[t] >= 0
            a, b = own[t - 1, top[t][kept]], values[t][kept].double()
            a, b = (torch.cat([v, torch.log1p(-v.exp().sum())[None]]) for v in (a, b))
            terms.append((b.exp() * (b - a)).sum())
    loss = torch.stack(terms).mean()
    loss.backward()
    return float(loss), sum(float(p.grad.square().sum()) for p in model.parameters()) ** 0.5


def found(batch, accumulation):
    folder = options()["output_dir"]
    tiny().save_pretrained(folder)
    cut = dict(per_device_train_batch_size=batch, gradient_accumulation_steps=accumulation, max_steps=1, token_budget=0)
    args = AsyncDistillationConfig(
        **options(
            **cut,
            gradient_checkpointing=False,
            beta=0.0,
            teacher_top_k=K,
            add_tail_bucket=True,
            model_init_kwargs={"attn_implementation": "eager"},
            teacher_server_urls={"default": "http://localhost:1"},
        )
    )
    data = datasets.Dataset.from_list([{"prompt": "w2"}])
    stubs = dict(rollout_worker=Rollouts(rollout), weight_transfer=Nobody())
    trainer = AsyncDistillationTrainer(folder, args=args, train_dataset=data, processing_class=tokenizer, **stubs)
    return step(trainer)


bad, (x, y) = 0, right()
print("| micro-batches | loss | right | gradient norm | right |\n|---|---|---|---|---|")
for batch, accumulation in ((4, 1), (2, 2), (1, 4)):
    a, b = found(batch, accumulation)
    bad |= abs(b / y - 1) > 1e-3
    print(f"| {accumulation} of {batch} | {a:.6g} | {x:.6g} | {b:.6g} | {y:.6g} |", flush=True)
raise SystemExit(int(bad))
