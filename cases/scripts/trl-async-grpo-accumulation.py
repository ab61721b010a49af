# TRL 1.16: AsyncGRPOTrainer's loss depends on how a window is cut into micro-batches
# Each micro-batch is divided by its own tokens, then by their number. Rollouts come from a list, weights go nowhere, and
# attention over the packed rows, a kernel of a GPU, is written out.
import itertools
import queue
import types

import datasets
import numpy as np
import torch
import transformers
from setup_tiny import options, tiny, tokenizer
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer, packing

LENGTHS = (1, 2, 7, 8)


class Nobody:
    def __getattr__(self, name):
        return lambda *args: None


class Rollouts(Nobody):
    """Four completions of `LENGTHS` tokens, again and again."""

    def __init__(self):
        self.rollout_buffer, self.metrics_queue, self.given = self, queue.Queue(), itertools.cycle(range(4))

    def qsize(self):
        return 1

    def get(self, timeout):
        return rollout(next(self.given))


def rollout(i):
    n = LENGTHS[i]
    ids, new = np.array([2 + i, *range(10, 10 + n)]), np.arange(n + 1) > 0
    about = dict(group_id=i, model_version=0, metrics={"reward": 0.0}, enqueued_at=None)
    old = np.where(new, -3.4, 0.0).astype("f4")
    return types.SimpleNamespace(
        input_ids=ids,
        completion_mask=new.astype("i8"),
        old_log_probs=old,
        advantage=(1.0, -0.5, -1.5, 1.0)[i],
        **about,
    )


def attention(q, k, v, cu_q, cu_k, *sizes, softmax_scale, **more):
    out = []
    for (a, b), (c, d) in zip(itertools.pairwise(cu_q.tolist()), itertools.pairwise(cu_k.tolist())):
        z = torch.einsum("qhd,khd->hqk", q[a:b], k[c:d]) * softmax_scale
        ahead = torch.ones(b - a, d - c, dtype=torch.bool).triu(d - c - (b - a) + 1)
        out.append(torch.einsum("hqk,khd->qhd", z.masked_fill(ahead, -torch.inf).softmax(-1), v[c:d]))
    return torch.cat(out)


packing._flash_attn = lambda: types.SimpleNamespace(flash_attn_varlen_func=attention)
async_grpo_trainer.get_peak_flops_per_device = lambda *args: None


class Keep(transformers.TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.gradient = torch.cat([p.grad.flatten().clone() for p in model.parameters() if p.grad is not None])


def gradient(batch, accumulation):
    keep, folder = Keep(), options()["output_dir"]
    tiny().save_pretrained(folder)
    cut = dict(per_device_train_batch_size=batch, gradient_accumulation_steps=accumulation, max_steps=1, token_budget=0)
    args = AsyncGRPOConfig(**options(**cut, gradient_checkpointing=False))
    data = datasets.Dataset.from_list([{"prompt": "w2"}])
    stubs = dict(rollout_worker=Rollouts(), weight_transfer=Nobody(), callbacks=[keep])
    trained = AsyncGRPOTrainer(folder, args=args, train_dataset=data, processing_class=tokenizer, **stubs)
    trained.remove_callback(transformers.PrinterCallback)  # its lines would stand in the table
    trained.train()
    return keep.gradient


print("| gradient norm, 2 x 2 | 4 x 1 | relative distance |\n|---|---|---|")
found, right = gradient(2, 2), gradient(4, 1)
off = float((found - right).norm() / right.norm())
print(f"| {float(found.norm()):.5g} | {float(right.norm()):.5g} | {off:.3g} |")
raise SystemExit(int(off > 1e-3))
