# transformers 5.23.0: an IterableDataset, max_steps, a run resumed behind its first epoch: it goes on with the dataset's start, not where it stopped
# transformers/trainer.py:Trainer._init_training_state divides by the steps of an epoch, which are max_steps here: epoch 0, and more batches to skip than the epoch has; what is left is nothing, then the next epoch
import torch
import transformers
from setup_tiny import options, tiny

ROWS = [dict(input_ids=torch.arange(2, 9) + i, labels=torch.arange(2, 9) + i) for i in range(6)]


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(ROWS)


def seen(resume=None, folder=None):
    """The rows of each of six steps."""
    wanted = dict(per_device_train_batch_size=1, max_steps=12, save_strategy="steps", save_steps=3)
    wanted |= dict(output_dir=folder) if folder else {}
    args = transformers.TrainingArguments(**options(**wanted))
    trainer = transformers.Trainer(tiny(), args, train_dataset=Stream())
    trainer.remove_callback(transformers.PrinterCallback)
    step, rows = trainer.training_step, []

    def watched(model, inputs, *more):
        rows.append(int(inputs["input_ids"][0, 0]) - 2)
        return step(model, inputs, *more)

    trainer.training_step = watched
    trainer.train(resume_from_checkpoint=resume and f"{args.output_dir}/checkpoint-{resume}")
    return rows, args.output_dir


transformers.logging.set_verbosity_error()
whole, folder = seen()
print("| 6 rows, 12 steps | rows of the steps that follow, right | found |\n|---|---|---|")
wrong = False
for step in (3, 9):
    found, _ = seen(step, folder)
    print(f"| resumed at step {step} | {whole[step:]} | {found} |")
    wrong |= found != whole[step:]
raise SystemExit(int(wrong))
