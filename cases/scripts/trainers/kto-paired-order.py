"""KTO on pairs, the defaults: each batch of training has one label.

Pairs are split in blocks of 1,000, all chosen ones first, and train_sampling_strategy is "sequential", the only one that losses
with a KL take.
"""

import datasets
from setup_tiny import options, tiny, tokenizer
from trl import KTOConfig, KTOTrainer

datasets.disable_progress_bars()
rows = [{"prompt": f"w{2 + i % 9}", "chosen": f" w{12 + i % 9}", "rejected": f" w{21 + i % 9}"} for i in range(1200)]
args = KTOConfig(**options())
trainer = KTOTrainer(
    tiny(), tiny(1), args=args, train_dataset=datasets.Dataset.from_list(rows), processing_class=tokenizer
)
counts = []
for batch in trainer.get_train_dataloader():
    label = "desirable" if all(batch["label"]) else "undesirable" if not any(batch["label"]) else "both"
    if not counts or counts[-1][0] != label:
        counts.append([label, 0])
    counts[-1][1] += 1
print("| labels | batches in a row |\n|---|---|")
for label, count in counts:
    print(f"| {label} | {count} |")
raise SystemExit(int(all(label != "both" for label, _ in counts)))
