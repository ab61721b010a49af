# TRL 1.16: KTO's KL is estimated with completions of other prompts, but where the dataset's last batch has one row, that row has
# its own: its KL is its own reward, for which per_device_train_batch_size=1 is refused
import datasets
import transformers
from setup_tiny import options, tiny, tokenizer
from trl import KTOConfig, KTOTrainer

transformers.utils.logging.set_verbosity_error()
rows = [{"prompt": f"w{i}", "completion": f" w{i + 9} w{2 * i}", "label": i % 2 == 0} for i in range(2, 11)]
args = KTOConfig(**options(per_device_train_batch_size=4))
data = datasets.Dataset.from_list(rows)
trainer = KTOTrainer(tiny(), ref_model=tiny(1), args=args, train_dataset=data, processing_class=tokenizer)
print("| row, in batches of 4 | completion | completion of the KL |\n|---|---|---|")
own = [row["completion_ids"] == row["KL_completion_ids"] for row in trainer.train_dataset]
for number in (7, 8):
    row = trainer.train_dataset[number]
    print(f"| {number + 1} of 9 | {row['completion_ids']} | {row['KL_completion_ids']} |")
raise SystemExit(int(any(own)))
