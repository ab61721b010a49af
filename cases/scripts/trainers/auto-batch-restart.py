# transformers 5.23.0: auto_find_batch_size, out of memory in a later step: training begins again from the weights and the optimizer's state of that step
# transformers/trainer.py:Trainer.train hands _inner_training_loop to find_executable_batch_size, which resets the schedule and the data, not the model nor the optimizer; the steps keep their accumulation
import torch
import transformers
from setup_tiny import options, tiny

ROWS = [dict(input_ids=torch.arange(2, 9) + i, labels=torch.arange(2, 9) + i) for i in range(12)]


def run(fails):
    """The model and the rows that it was trained on, of one epoch; `fails`: the step of four rows that runs out of memory."""
    wanted = dict(per_device_train_batch_size=4, num_train_epochs=1, learning_rate=1e-2, auto_find_batch_size=True)
    args = transformers.TrainingArguments(**options(**wanted, train_sampling_strategy="sequential"))
    trainer = transformers.Trainer(tiny(), args, train_dataset=ROWS)
    trainer.remove_callback(transformers.PrinterCallback)
    step, seen = trainer.training_step, []

    def watched(model, inputs, *more):
        first = inputs["input_ids"][:, 0].tolist()
        if len(first) == 4 and len(seen) == fails:
            raise torch.OutOfMemoryError("CUDA out of memory. as a long row would")
        seen.append(first)
        return step(model, inputs, *more)

    trainer.training_step = watched
    trainer.train()
    rows = [row for batch in seen for row in batch]
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()]), rows, trainer.state.global_step


print(
    "| one epoch of 12 rows; out of memory with 4 rows | rows trained on | steps told | distance of the weights from those of the first line |"
)
print("|---|---|---|---|")
wrong = False
for fails in (0, 1, 2):
    weights, rows, steps = run(fails)
    if not fails:
        first = weights
    off = float((weights - first).norm())
    print(f"| in step {fails + 1} | {len(rows)} | {steps} | {off:.4f} |")
    wrong |= len(rows) != len(ROWS) or off > 1e-6
raise SystemExit(int(wrong))
