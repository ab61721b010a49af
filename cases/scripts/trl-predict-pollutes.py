# TRL 1.16: predict() leaves its metrics behind: the next evaluate() logs means over both datasets
# DPO; eval_loss, of transformers, is right.
import datasets
import transformers
from setup_tiny import PAIRS, options, tiny, tokenizer
from trl import DPOConfig, DPOTrainer

transformers.utils.logging.set_verbosity_error()
data = {"a": datasets.Dataset.from_list(PAIRS[:2]), "b": datasets.Dataset.from_list(PAIRS[2:])}
args, models = DPOConfig(**options(prediction_loss_only=True)), dict(model=tiny(), ref_model=tiny(1))
trainer = DPOTrainer(**models, args=args, train_dataset=data["a"], eval_dataset=data, processing_class=tokenizer)
trainer.remove_callback(transformers.PrinterCallback)
alone = trainer.evaluate(trainer.eval_dataset["a"])
trainer.predict(trainer.eval_dataset["b"])
behind = trainer.evaluate(trainer.eval_dataset["a"])
print("| evaluate() | alone | behind predict() of other data |\n|---|---|---|")
for name in ("eval_rewards/margins", "eval_logps/chosen", "eval_loss"):
    print(f"| {name} | {alone[name]:.5f} | {behind[name]:.5f} |")
raise SystemExit(int(abs(alone["eval_logps/chosen"] - behind["eval_logps/chosen"]) > 1e-4))
