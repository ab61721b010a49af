# TRL 1.16: GOLDTrainer divides by the label tokens of the window, counted once for each of its micro-batches
import datasets
import torch
import transformers
from setup_tiny import options, tiny, tokenizer
from trl.experimental.gold import GOLDConfig, GOLDTrainer

rows = [([2, 3], [4, 5, 6, 7, 8]), ([9, 10, 11, 12], [13, 14])]
data = [
    {
        "messages": [{"role": "user", "content": "w2"}, {"role": "assistant", "content": "w4"}],
        "input_ids": prompt + completion,
        "completion_mask": [0] * len(prompt) + [1] * len(completion),
    }
    for prompt, completion in rows
]
parts = []
for prompt, completion in rows:
    ids = torch.tensor([prompt + completion])
    with torch.no_grad():
        student, teacher = (m.double()(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1) for m in (tiny(), tiny(1)))
    mixture = torch.logaddexp(student, teacher) - torch.tensor(2.0).double().log()
    parts.append((0.5 * (student.exp() * (student - mixture) + teacher.exp() * (teacher - mixture))).sum(-1))
right, wrong = float(torch.cat(parts).mean()), []
print("| batch x accumulation | loss of the window | mean of the JSD over its tokens |\n|---|---|---|")
for batch in (2, 1):
    steps = dict(per_device_train_batch_size=batch, gradient_accumulation_steps=2 // batch, max_steps=1)
    args = GOLDConfig(**options(lmbda=0.0, beta=0.5, temperature=1.0, max_length=32, max_completion_length=8, **steps))
    dataset = datasets.Dataset.from_list(data)
    trainer = GOLDTrainer(tiny(), tiny(1), args=args, train_dataset=dataset, processing_class=tokenizer)
    trainer.remove_callback(transformers.PrinterCallback)  # its lines would stand in the table
    step, losses = trainer.training_step, []

    def watched(*given, step=step, losses=losses):
        losses.append(step(*given))
        return losses[-1]

    trainer.training_step = watched
    trainer.train()
    found = float(sum(losses))
    print(f"| {batch}x{2 // batch} | {found:.4g} | {right:.4g} |")
    wrong.append(abs(found / right - 1) > 1e-3)
raise SystemExit(int(any(wrong)))
