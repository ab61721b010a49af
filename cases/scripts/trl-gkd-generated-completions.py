# TRL 1.16: GKDTrainer divides the loss of generated completions by the token count of the dataset's
# Trainer counts labels before training_step exchanges the completions (lmbda, 0.5 by default; here 1).
import datasets
import torch
import transformers
from setup_tiny import options, tiny, tokenizer
from trl.experimental.gkd import GKDConfig, GKDTrainer

turns = [("user", "w2 w3"), ("assistant", " ".join(["w4"] * 16))]
data = datasets.Dataset.from_list([{"messages": [{"role": role, "content": text} for role, text in turns]}] * 2)
tokenizer.chat_template = "{% for m in messages %}{{ m.content + ' ' }}{% endfor %}"
args = GKDConfig(
    **options(lmbda=1.0, beta=0.5, max_new_tokens=4, max_length=32, max_steps=1, per_device_train_batch_size=2)
)
trainer = GKDTrainer(tiny(), tiny(1), args=args, train_dataset=data, processing_class=tokenizer)
trainer.remove_callback(transformers.PrinterCallback)  # its lines would stand in the table
compute_loss, found = trainer.compute_loss, {}


def watched(model, inputs, **more):
    found.update(inputs=inputs, loss=compute_loss(model, inputs, **more))
    return found["loss"]


trainer.compute_loss = watched
trainer.train()
given = {name: found["inputs"][name] for name in ("input_ids", "attention_mask")}
with torch.no_grad():
    student, teacher = (m.double()(**given).logits[:, :-1].log_softmax(-1) for m in (tiny(), tiny(1)))
mixture = torch.logaddexp(student, teacher) - torch.tensor(2.0).double().log()
jsd = (0.5 * (student.exp() * (student - mixture) + teacher.exp() * (teacher - mixture))).sum(-1)
own = found["inputs"]["labels"][:, 1:] != -100
right = float(jsd[own].mean())
print(f"| generated tokens | loss | mean of the JSD over them |\n|---|---|---|\n| {int(own.sum())} ", end="")
print(f"| {float(found['loss'].detach()):.4g} | {right:.4g} |")
raise SystemExit(int(abs(float(found["loss"]) / right - 1) > 1e-3))
