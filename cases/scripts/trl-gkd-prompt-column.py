# TRL 1.16: a column "prompt" beside "messages" (ultrachat_200k) moves the place where GKD's completions begin
# The collator takes it for the prompt as the chat template writes it. A word of the template is missing for each of its own.
from setup_distilled import made, said
from setup_tiny import tokenizer
from trl.experimental.gkd import GKDConfig, GKDTrainer

tokenizer.chat_template = (
    "{% for m in messages %}{{ 'w20 ' + m.content + ' w21 ' }}{% endfor %}{% if add_generation_prompt %}w20 {% endif %}"
)
bad, right = False, None
print("| columns | the student goes on after | trained on |\n|---|---|---|")
for name, column in (("messages", {}), ("messages, prompt", {"prompt": "w2 w3 w4"})):
    trainer = made(GKDTrainer, GKDConfig, [said([2, 3, 4], [5, 6]) | column], 1)
    batch = next(iter(trainer.get_train_dataloader()))
    labels = batch["labels"][0]
    found = tokenizer.decode(batch["prompts"][0]), tokenizer.decode(labels[labels != -100])
    right = right or found
    bad |= found != right
    print(f"| {name} | {found[0]} | {found[1]} |")
raise SystemExit(int(bad))
