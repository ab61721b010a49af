# TRL 1.16: SFT's completion_only_loss=True has no effect on messages and texts: every token is trained on, without a warning
# It is documented for prompts and completions alone; of other rows no completion_mask is made, and nothing looks for one.
import datasets
from setup_tiny import options, tiny, tokenizer
from trl import SFTConfig, SFTTrainer

tokenizer.chat_template = "{% for m in messages %}{{ m.content + ' ' }}{% endfor %}"
user, answer = {"role": "user", "content": "w2 w3"}, {"role": "assistant", "content": "w4 w5"}
ROWS = {
    "prompt, completion": {"prompt": [user], "completion": [answer]},
    "messages": {"messages": [user, answer]},
    "text": {"text": "w2 w3 w4 w5"},
}
bad = False
print("| columns | trained on | right |\n|---|---|---|")
for name, row in ROWS.items():
    args = SFTConfig(**options(max_steps=1, completion_only_loss=True))
    try:
        trainer = SFTTrainer(
            tiny(), args=args, train_dataset=datasets.Dataset.from_list([row] * 2), processing_class=tokenizer
        )
        labels = next(iter(trainer.get_train_dataloader()))["labels"][0]
        found = tokenizer.decode(labels[labels != -100])
        bad |= "w2" in found
    except ValueError as error:
        found = f"ValueError: {error}"
    print(f"| {name} | {found} | {'w4 w5' if name != 'text' else 'ValueError'} |")
raise SystemExit(int(bad))
