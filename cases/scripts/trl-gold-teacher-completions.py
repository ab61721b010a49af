# TRL 1.16: seq_kd of GOLDTrainer has no effect: the dataset's completions are trained on, not the teacher's
import datasets
import transformers
from setup_tiny import options, tiny, tokenizer
from trl.experimental.gold import GOLDConfig, GOLDTrainer

row = {
    "messages": [{"role": "user", "content": "w2"}, {"role": "assistant", "content": "w4"}],
    "input_ids": [2, 3, 4, 5, 6, 7],
    "completion_mask": [0, 0, 1, 1, 1, 1],
}
steps = dict(max_steps=1, per_device_train_batch_size=2, lmbda=0.0, seq_kd=True)
args = GOLDConfig(**options(max_completion_length=4, max_length=32, **steps))
dataset = datasets.Dataset.from_list([row] * 2)
trainer = GOLDTrainer(tiny(), tiny(1), args=args, train_dataset=dataset, processing_class=tokenizer)
trainer.remove_callback(transformers.PrinterCallback)  # its lines would stand in the table
asked, seen = [], []
compute_loss, generate = trainer.compute_loss, trainer.teacher_model.generate


def watched(model, inputs, **more):
    seen.append(inputs["input_ids"][0].tolist())
    return compute_loss(model, inputs, **more)


def generating(*given, **more):
    asked.append(1)
    return generate(*given, **more)


trainer.compute_loss, trainer.teacher_model.generate = watched, generating
trainer.train()
print("| calls of the teacher's generate | trained on | the dataset's |\n|---|---|---|")
print(f"| {len(asked)} | {seen[0]} | {row['input_ids']} |")
raise SystemExit(int(not asked))
