# transformers 5.23.0: an IterableDataset, max_steps, gradient_accumulation_steps: what is left over at the end of an epoch counts in the next step's gradient
# transformers/trainer.py:Trainer._run_epoch steps where (step + 1) % accumulation is 0 or at the epoch's end, which it does not know here; it sets no gradient to 0 for the next epoch
import torch
import transformers
from setup_processes import Keep
from setup_tiny import options, tiny

ROWS = [dict(input_ids=torch.arange(2, 9) + i, labels=torch.arange(2, 9) + i) for i in range(4)]


class Stream(torch.utils.data.IterableDataset):
    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return iter(self.rows)


def run(rows, steps):
    """Norms of the gradients of each step, at a learning rate of 0, and the losses logged."""
    wanted = dict(per_device_train_batch_size=1, gradient_accumulation_steps=2, max_steps=steps)
    wanted |= dict(logging_strategy="steps", logging_steps=1)
    args = transformers.TrainingArguments(**options(**wanted))
    keep = Keep()
    trainer = transformers.Trainer(tiny(), args, train_dataset=Stream(rows), callbacks=[keep])
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    return keep.norms, [row["loss"] for row in trainer.state.log_history if "loss" in row]


norms, losses = run(ROWS[:3], 4)
(first, _), (loss, _) = run(ROWS, 2)
print("| 3 rows in an epoch, 2 in a step, weights at rest | gradient norm | loss |\n|---|---|---|")
for k, (norm, one) in enumerate(zip(norms, losses, strict=True), 1):
    print(f"| step {k} | {norm:.4f} | {one:.4f} |")
print(f"| right: rows 1 and 2 | {first:.4f} | {loss:.4f} |")
raise SystemExit(int(any(abs(norm / first - 1) > 0.3 for norm in norms)))
