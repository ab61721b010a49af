# transformers 5.23.0: train_sampling_strategy="group_by_length", `predict`: predictions stand in an order of their own, not in that of the dataset
# transformers/trainer.py:Trainer.get_test_dataloader takes _get_eval_sampler, which shuffles by LengthGroupedSampler, though the setting is "the sampler to use for the training dataloader"
import transformers
from setup_tiny import options, tiny, tokenizer

LENGTHS = 3, 9, 4, 12, 5, 7, 10, 6
ROWS = [dict(input_ids=list(range(2, 2 + n)), labels=list(range(2, 2 + n))) for n in LENGTHS]


def lengths(kind):
    """Tokens that are labels in each row of what `predict` returns."""
    wanted = dict(per_device_eval_batch_size=2, train_sampling_strategy=kind)
    args = transformers.TrainingArguments(**options(**wanted))
    collator = transformers.DataCollatorForSeq2Seq(tokenizer)
    trainer = transformers.Trainer(tiny(), args, collator, processing_class=tokenizer)
    found = trainer.predict(ROWS)
    return [int((row != -100).sum()) for row in found.label_ids]


transformers.logging.disable_progress_bar()
print("| train_sampling_strategy | tokens of each row that `predict` returns | of the dataset |\n|---|---|---|")
wrong = False
for kind in ("random", "group_by_length"):
    found = lengths(kind)
    print(f"| {kind} | {found} | {list(LENGTHS)} |")
    wrong |= found != list(LENGTHS)
raise SystemExit(int(wrong))
