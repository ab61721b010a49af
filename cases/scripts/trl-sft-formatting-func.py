# TRL 1.16: SFT's formatting_func has no effect beside messages, prompt and completion, or another dataset_text_field
# It writes a column "text", and the tokenizer then takes the other one.
import datasets
from setup_tiny import options, tiny, tokenizer
from trl import SFTConfig, SFTTrainer

tokenizer.chat_template = "{% for m in messages %}{{ m.content + ' ' }}{% endfor %}"
said = {"messages": [{"role": "user", "content": "w2 w3"}, {"role": "assistant", "content": "w4 w5"}]}
ROWS = {
    "question, answer": ({"question": "w2", "answer": "w3"}, {}),
    "text": ({"text": "w2 w3"}, {}),
    "messages": (said, {}),
    "prompt, completion": ({"prompt": "w2", "completion": " w3"}, {"completion_only_loss": False}),
    "content, the dataset_text_field": ({"content": "w2 w3"}, {"dataset_text_field": "content"}),
}
right = [*tokenizer("w20 w21 w22")["input_ids"], tokenizer.eos_token_id]
bad = False
print("| columns | trained on | formatting_func's |\n|---|---|---|")
for name, (row, more) in ROWS.items():
    trainer = SFTTrainer(
        tiny(),
        args=SFTConfig(**options(max_steps=1, **more)),
        train_dataset=datasets.Dataset.from_list([row] * 2),
        processing_class=tokenizer,
        formatting_func=lambda row: "w20 w21 w22",
    )
    found = next(iter(trainer.get_train_dataloader()))["input_ids"][0].tolist()
    bad |= found != right
    print(f"| {name} | {found} | {right} |")
raise SystemExit(int(bad))
