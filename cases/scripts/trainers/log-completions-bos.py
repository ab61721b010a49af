"""LogCompletionsCallback: completions are of prompts with two <bos>, one by the chat template, one by the tokenizer, and
generated in training mode, with dropout.
"""

import datasets
import transformers
from setup_begun import quiet, tokenizer
from setup_tiny import tiny
from trl import LogCompletionsCallback, SFTConfig, SFTTrainer

tokenizer.chat_template = "<bos> {% for m in messages %}{{ m.content + ' ' }}{% endfor %}"
row = {"prompt": [{"role": "user", "content": "w3 w4"}], "completion": [{"role": "assistant", "content": "w5"}]}
data, model, seen = datasets.Dataset.from_list([row] * 2), tiny(), []
args = quiet(SFTConfig, eval_strategy="steps", eval_steps=1)
trainer = SFTTrainer(model, args=args, train_dataset=data, eval_dataset=data, processing_class=tokenizer)
trainer.remove_callback(transformers.PrinterCallback)
trainer.add_callback(LogCompletionsCallback(trainer, transformers.GenerationConfig(max_new_tokens=2)))
generate = model.generate


def watched(input_ids, **more):
    seen.append((tokenizer.decode(input_ids[0]), model.training))
    return generate(input_ids, **more)


model.generate = watched
trainer.train()
trained = tokenizer.decode(next(iter(trainer.get_train_dataloader()))["input_ids"][0])
print("\n| trained on | completions of | in training mode |\n|---|---|---|")
print(f"| {trained} | {seen[0][0]} | {seen[0][1]} |")
raise SystemExit(int(seen[0] != ("<bos> w3 w4", False)))
