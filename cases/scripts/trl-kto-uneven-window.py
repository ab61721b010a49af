# TRL 1.16: the last, smaller micro-batch of a KTO window weighs as much as a full one
# KTO's loss is a mean over the micro-batch and the training loop divides by the number of micro-batches.
import datasets
import torch
import transformers
from setup_tiny import options, tiny, tokenizer
from trl import KTOConfig, KTOTrainer

ROWS = [
    {"prompt": "w2 w3", "completion": " w4 w5 w6", "label": True},
    {"prompt": "w9 w10", "completion": " w11", "label": False},
    {"prompt": "w15", "completion": " w16 w17", "label": True},
]


class Keep(transformers.TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.gradient = torch.cat([p.grad.flatten().clone() for p in model.parameters() if p.grad is not None])


def gradient(batch, accumulation):
    keep = Keep()
    sizes = dict(per_device_train_batch_size=batch, gradient_accumulation_steps=accumulation, max_steps=1)
    args = KTOConfig(**options(loss_type="apo_zero_unpaired", **sizes))
    data = datasets.Dataset.from_list(ROWS)
    trainer = KTOTrainer(
        tiny(), ref_model=tiny(), args=args, train_dataset=data, processing_class=tokenizer, callbacks=[keep]
    )
    trainer.remove_callback(transformers.PrinterCallback)  # its lines would stand above the table
    trainer.train()
    return keep.gradient


found, right = gradient(2, 2), gradient(3, 1)
off = float((found - right).norm() / right.norm())
print("| gradient of three completions | norm |\n|---|---|")
print(f"| as 2 + 1, accumulated | {float(found.norm()):.6g} |\n| as one batch of 3 | {float(right.norm()):.6g} |")
print(f"relative distance {off:.3g}")
raise SystemExit(int(off > 1e-3))
