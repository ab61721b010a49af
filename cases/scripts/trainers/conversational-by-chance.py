"""is_conversational looks at one of the columns prompt, completion, chosen, rejected, messages, the first of a set: of rows with
texts in some and messages in others Python's hash seed, another in each process, says what they are.

SFT on prompt and completion (texts) beside messages: with some seeds completions get <eos>.
"""

import os
import subprocess
import sys

import datasets
from setup_tiny import options, tiny, tokenizer
from trl import SFTConfig, SFTTrainer

if len(sys.argv) == 1:
    found, first = {}, "print({'prompt', 'completion', 'messages'}.pop())"
    print("| hash seed | looked at | trained on |\n|---|---|---|")
    for seed in range(60):  # one for each column
        given = dict(env=os.environ | {"PYTHONHASHSEED": str(seed)}, capture_output=True, text=True)
        column = subprocess.run([sys.executable, "-c", first], **given).stdout.strip()
        if column not in found:
            found[column] = subprocess.run([sys.executable, __file__, "tokens"], **given).stdout.splitlines()[-1]
            print(f"| {seed} | {column} | {found[column]} |")
    raise SystemExit(int(len(set(found.values())) > 1))

tokenizer.chat_template = "{% for m in messages %}{{ m.content + ' ' }}{% endfor %}"
turns = [{"role": "user", "content": "w2 w3"}, {"role": "assistant", "content": "w4"}]
row = {"prompt": "w2 w3", "completion": " w4", "messages": turns}
data = datasets.Dataset.from_list([row] * 2)
trainer = SFTTrainer(tiny(), args=SFTConfig(**options()), train_dataset=data, processing_class=tokenizer)
labels = next(iter(trainer.get_train_dataloader()))["labels"][0]
print(tokenizer.decode(labels[labels != -100]))
