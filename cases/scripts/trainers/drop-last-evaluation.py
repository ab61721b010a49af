# transformers 5.23.0: `dataloader_drop_last`: evaluation and `predict` leave out the rows of the last, incomplete batch too; a dataset of less than a batch has no eval_loss
# transformers/trainer.py:Trainer._get_dataloader sets drop_last for every dataset, and evaluation_loop counts len(dataset) samples
import transformers
from setup_tiny import options, tiny

ROWS = [dict(input_ids=list(range(2 + i, 10 + i)), labels=list(range(2 + i, 10 + i))) for i in range(10)]


def run(count, drop):
    """Rows that `predict` returns, samples that are counted, and the loss of the evaluation."""
    wanted = dict(per_device_eval_batch_size=4, dataloader_drop_last=drop)
    args = transformers.TrainingArguments(**options(**wanted))
    trainer = transformers.Trainer(tiny(), args, eval_dataset=ROWS[:count])
    trainer.remove_callback(transformers.PrinterCallback)
    found = trainer.predict(ROWS[:count])
    rows = 0 if found.predictions is None else len(found.predictions)
    rate = found.metrics["test_samples_per_second"] * found.metrics["test_runtime"]
    return rows, round(rate), trainer.evaluate().get("eval_loss")


transformers.logging.disable_progress_bar()
print("| rows | dataloader_drop_last | predictions | counted | eval_loss |\n|---|---|---|---|---|")
wrong = False
for count in (10, 3):
    for drop in (False, True):
        rows, counted, loss = run(count, drop)
        print(f"| {count} | {drop} | {rows} | {counted} | {'none' if loss is None else f'{loss:.4f}'} |")
        wrong |= rows != count
raise SystemExit(int(wrong))
