# TRL 1.16: CPO's and ORPO's likelihood term depends on how a window is cut into micro-batches
# It is nn.CrossEntropyLoss over the micro-batch, and the training loop divides by the number of micro-batches.
import datasets
import torch
import transformers
from setup_tiny import PAIRS, options, tiny, tokenizer
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer


class Keep(transformers.TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.gradient = torch.cat([p.grad.flatten().clone() for p in model.parameters() if p.grad is not None])


def gradient(trainer, config, batch, accumulation):
    keep = Keep()
    args = config(**options(per_device_train_batch_size=batch, gradient_accumulation_steps=accumulation, max_steps=1))
    data = datasets.Dataset.from_list(PAIRS)
    trained = trainer(tiny(), args=args, train_dataset=data, processing_class=tokenizer, callbacks=[keep])
    trained.remove_callback(transformers.PrinterCallback)  # its lines would stand in the table
    trained.train()
    return keep.gradient


worst = 0.0
print("| four pairs | gradient norm, 1 x 4 | 4 x 1 | relative distance |\n|---|---|---|---|")
for trainer, config in ((CPOTrainer, CPOConfig), (ORPOTrainer, ORPOConfig)):
    found, right = (gradient(trainer, config, *split) for split in ((1, 4), (4, 1)))
    off = float((found - right).norm() / right.norm())
    worst = max(worst, off)
    print(f"| {trainer.__name__} | {float(found.norm()):.5g} | {float(right.norm()):.5g} | {off:.3g} |")
raise SystemExit(int(worst > 1e-3))
