# TRL 1.16: the last, smaller micro-batch of a DPO window weighs as much as a full one
# DPO's loss is a mean over the micro-batch and the training loop divides by the number of micro-batches.
import datasets
import torch
import transformers
from setup_tiny import PAIRS, options, tiny, tokenizer
from trl import DPOConfig, DPOTrainer


class Keep(transformers.TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.gradient = torch.cat([p.grad.flatten().clone() for p in model.parameters() if p.grad is not None])


def gradient(batch, accumulation):
    keep = Keep()
    args = DPOConfig(
        **options(per_device_train_batch_size=batch, gradient_accumulation_steps=accumulation, max_steps=1)
    )
    data = datasets.Dataset.from_list(PAIRS[:3])
    trainer = DPOTrainer(
        tiny(), ref_model=tiny(), args=args, train_dataset=data, processing_class=tokenizer, callbacks=[keep]
    )
    trainer.remove_callback(transformers.PrinterCallback)  # its lines would stand above the table
    trainer.train()
    return keep.gradient


found, right = gradient(2, 2), gradient(3, 1)
off = float((found - right).norm() / right.norm())
print("| gradient of three pairs | norm |\n|---|---|")
print(f"| as 2 + 1, accumulated | {float(found.norm()):.6g} |\n| as one batch of 3 | {float(right.norm()):.6g} |")
print(f"relative distance {off:.3g}")
raise SystemExit(int(off > 1e-3))
