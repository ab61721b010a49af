# TRL 1.16: with a dict of evaluation datasets a trainer's own metrics lack the name of their dataset, which transformers puts
# before each metric: evaluate() returns those of the last dataset alone, and metric_for_best_model finds no others
import datasets
import transformers
from setup_tiny import PAIRS, options, tiny, tokenizer
from trl import DPOConfig, DPOTrainer

transformers.utils.logging.set_verbosity_error()
data = {"a": datasets.Dataset.from_list(PAIRS[:2]), "b": datasets.Dataset.from_list(PAIRS[2:])}
args, models = DPOConfig(**options()), dict(model=tiny(), ref_model=tiny(1))
trainer = DPOTrainer(**models, args=args, train_dataset=data["a"], eval_dataset=data, processing_class=tokenizer)
trainer.remove_callback(transformers.PrinterCallback)
alone = {name: trainer.evaluate(trainer.eval_dataset[name]) for name in data}
both = trainer.evaluate()
print("| metric | of a alone | of b alone | evaluate() of both, by name | without |\n|---|---|---|---|---|")
for metric in ("loss", "rewards/margins", "logps/chosen"):
    values = [f"{alone[name][f'eval_{metric}']:.5f}" for name in data]
    named = [f"{both[key]:.5f}" for name in data if (key := f"eval_{name}_{metric}") in both]
    without = f"{both[f'eval_{metric}']:.5f}" if f"eval_{metric}" in both else ""
    print(f"| {metric} | {' | '.join(values)} | {', '.join(named)} | {without} |")
raise SystemExit(int("eval_a_rewards/margins" not in both))
