# TRL 1.16: a trainer's own metrics of an evaluation are means of its batches' means, each of the same weight: of nine pairs in
# batches of eight the last one weighs as much as the other eight (eval_loss, of transformers, is right)
import datasets
import transformers
from setup_tiny import options, tiny, tokenizer
from trl import DPOConfig, DPOTrainer

transformers.utils.logging.set_verbosity_error()
NAMES = ("eval_rewards/accuracies", "eval_rewards/margins", "eval_logps/chosen", "eval_loss")
rows = [{"prompt": f"w{i}", "chosen": f" w{i + 1}", "rejected": f" w{i + 2} w3"} for i in range(2, 11)]


def evaluated(size):
    args, data = DPOConfig(**options(per_device_eval_batch_size=size)), datasets.Dataset.from_list(rows)
    models = dict(model=tiny(), ref_model=tiny(1))
    trainer = DPOTrainer(**models, args=args, train_dataset=data, eval_dataset=data, processing_class=tokenizer)
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer.evaluate()


found, right = evaluated(8), evaluated(9)
print("| of nine pairs | in batches of 8 | in one |\n|---|---|---|")
for name in NAMES:
    print(f"| {name} | {found[name]:.5f} | {right[name]:.5f} |")
raise SystemExit(int(abs(found[NAMES[1]] - right[NAMES[1]]) > 1e-5))
