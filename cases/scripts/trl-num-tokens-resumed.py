# TRL 1.16: SFT, DPO, KTO: the logged num_tokens begins at 0 again in a resumed run
# GRPO's is in the trainer's state.
import tempfile

import datasets
import transformers
from setup_self import saved
from setup_tiny import PAIRS, options, tiny, tokenizer
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

transformers.utils.logging.set_verbosity_error()


def run(kind, config, rows, folder, resume=None):
    logged = dict(logging_strategy="steps", logging_steps=1, save_strategy="steps", save_steps=2, output_dir=folder)
    args = config(**options(per_device_train_batch_size=2, max_steps=4, **logged))
    data = datasets.Dataset.from_list(rows)
    trainer = kind(saved(tiny()), args=args, train_dataset=data, processing_class=tokenizer)
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train(resume_from_checkpoint=resume)
    return [int(row["num_tokens"]) for row in trainer.state.log_history if "num_tokens" in row]


bad = False
print("| num_tokens of four steps | whole run | resumed behind step 2 |\n|---|---|---|")
texts = [{"text": pair["prompt"] + pair["chosen"]} for pair in PAIRS]
for kind, config, rows in ((SFTTrainer, SFTConfig, texts), (DPOTrainer, DPOConfig, PAIRS)):
    folder = tempfile.mkdtemp()
    whole, resumed = (run(kind, config, rows, folder, resume) for resume in (None, f"{folder}/checkpoint-2"))
    print(f"| {kind.__name__} | {whole} | {resumed} |")
    bad |= whole != resumed
raise SystemExit(int(bad))
