# TRL 1.16.0, SFT, rows with `prompt` and `completion` (texts) and a column that is called `text` too: completions get no <eos>: the model is not taught to stop
# trl/trainer/sft_trainer.py:add_eos appends it to dataset_text_field where there is one, `elif` to the completion; tokenize_fn asks for `prompt` first
import datasets
import transformers
from setup_tiny import options, tiny, tokenizer
from trl import SFTConfig, SFTTrainer

transformers.logging.set_verbosity_error()
datasets.disable_progress_bars()
PAIR = {"prompt": "w2 w3", "completion": " w4 w5"}
ROWS = {
    "prompt, completion": PAIR,
    "prompt, completion, text": PAIR | {"text": "w2 w3 w4 w5"},
    "prompt, completion, text that ends with <eos>": PAIR | {"text": "w2 w3 w4 w5<eos>"},
}
print("| columns | trained on | right |\n|---|---|---|")
wrong = False
for name, row in ROWS.items():
    data = datasets.Dataset.from_list([row] * 2)
    trainer = SFTTrainer(tiny(), args=SFTConfig(**options()), train_dataset=data, processing_class=tokenizer)
    labels = next(iter(trainer.get_train_dataloader()))["labels"][0]
    found = tokenizer.decode(labels[labels != -100])
    print(f"| {name} | {found} | w4 w5 <eos> |")
    wrong |= "<eos>" not in found
raise SystemExit(int(wrong))
