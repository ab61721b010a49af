# transformers 5.23.0: train_sampling_strategy "group_by_length", a resumed run: the epoch goes on in the first one's order, some rows are trained on twice, others never; "batch_rebalance": seed has no effect
# transformers/trainer.py:Trainer._get_train_sampler gives LengthGroupedSampler no generator (it draws from torch's global state, which is restored only later), BatchRebalanceSampler no seed
import collections

import torch
import transformers
from setup_tiny import options, tiny

LENGTHS = [7, 3, 10, 4, 8, 5, 12, 9, 6, 11, 3, 8]
ROWS = [dict(input_ids=[2 + i] * n, labels=[2 + i] * n) for i, n in enumerate(LENGTHS)]


def collate(rows):
    longest = max(len(row["input_ids"]) for row in rows)
    fill = {"input_ids": 0, "labels": -100}
    return {name: torch.tensor([r[name] + [by] * (longest - len(r[name])) for r in rows]) for name, by in fill.items()}


def seen(strategy, seed=42, resume=None, folder=None):
    """The rows of each step, of two epochs."""
    wanted = dict(per_device_train_batch_size=2, num_train_epochs=2, save_strategy="steps", save_steps=3, seed=seed)
    wanted |= dict(output_dir=folder) if folder else {}
    args = transformers.TrainingArguments(**options(**wanted, train_sampling_strategy=strategy))
    trainer = transformers.Trainer(tiny(), args, train_dataset=ROWS, data_collator=collate)
    trainer.remove_callback(transformers.PrinterCallback)
    step, rows = trainer.training_step, []

    def watched(model, inputs, *more):
        rows.append([int(token) - 2 for token in inputs["input_ids"][:, 0]])
        return step(model, inputs, *more)

    trainer.training_step = watched
    trainer.train(resume_from_checkpoint=resume)
    return rows, args.output_dir


transformers.logging.set_verbosity_error()
print("| order | second epoch in one run | resumed in its middle | trained on twice | never | seed 7: another order |")
print("|---|---|---|---|---|---|")
bad = False
for strategy in ("random", "group_by_length", "batch_rebalance"):
    whole, folder = seen(strategy)
    rest, _ = seen(strategy, resume=f"{folder}/checkpoint-9", folder=folder)
    second, rest = [row for batch in whole[6:] for row in batch], [row for batch in rest for row in batch]
    count = collections.Counter(second[:6] + rest)
    twice, never = [r for r in count if count[r] > 1], [r for r in range(12) if r not in count]
    other = seen(strategy, seed=7)[0] != whole
    print(f"| {strategy} | {second} | … {rest} | {twice} | {never} | {other} |")
    bad |= bool(twice) or not other
raise SystemExit(int(bad))
