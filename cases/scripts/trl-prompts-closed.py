# TRL 1.16: GRPO, RLOO and distillation close a prompt that ends with a message of the assistant, and begin another one
# apply_chat_template of TRL, by which online DPO goes: "if the last role is assistant, the final message is continued".
import datasets
import transformers
from setup_tiny import options, tiny, tokenizer
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer, apply_chat_template

tokenizer.padding_side = "left"
tokenizer.chat_template = (
    "{% for m in messages %}{{ 'w20 ' + m.content + ' w21 ' }}{% endfor %}{% if add_generation_prompt %}w20 {% endif %}"
)
prompt = [{"role": "user", "content": "w2 w3"}, {"role": "assistant", "content": "w4"}]
right = apply_chat_template({"prompt": prompt}, tokenizer)["prompt"].strip()
bad = False
print("| trainer | the model goes on after | right |\n|---|---|---|")
for kind, config in ((GRPOTrainer, GRPOConfig), (RLOOTrainer, RLOOConfig)):
    args = config(
        **options(per_device_train_batch_size=2, num_generations=2, max_completion_length=2, max_steps=1, beta=0.0)
    )
    data = datasets.Dataset.from_list([{"prompt": prompt}])
    trainer = kind(tiny(), lambda completions, **_: [0.0, 0.0], args, data, processing_class=tokenizer)
    trainer.remove_callback(transformers.PrinterCallback)
    seen, compute_loss = [], trainer.compute_loss

    def watched(model, inputs, seen=seen, compute_loss=compute_loss, **more):
        seen.append(tokenizer.decode(inputs["prompt_ids"][0]))
        return compute_loss(model, inputs, **more)

    trainer.compute_loss = watched
    trainer.train()
    bad |= seen[0] != right
    print(f"| {kind.__name__} | {seen[0]} | {right} |")
raise SystemExit(int(bad))
