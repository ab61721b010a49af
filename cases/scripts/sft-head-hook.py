# TRL 1.13 (below 1.15): SFT's default loss leaves out a forward hook on lm_head
# chunked_nll multiplies hidden states by lm_head.weight itself and never calls lm_head, while generation does.
import datasets
from setup_tiny import PAIRS, options, tiny, tokenizer, torch
from trl import SFTConfig, SFTTrainer
from trl.trainer import sft_trainer

if hasattr(sft_trainer, "add_fused_lm_head"):
    print("no chunked_nll here; the fused LM head of this release has findings of its own")
    raise SystemExit(0)
model, own = tiny(), []
model.lm_head.weight.data *= 20
model.lm_head.register_forward_hook(lambda module, given, out: out * 0.5)
args = SFTConfig(**options(per_device_train_batch_size=4, max_steps=1, logging_strategy="steps", logging_steps=1))
data = datasets.Dataset.from_list([{"prompt": pair["prompt"], "completion": pair["chosen"]} for pair in PAIRS])
trainer = SFTTrainer(model, args=args, train_dataset=data, processing_class=tokenizer)
compute = trainer.compute_loss


def watched(model, inputs, *more, **options):
    with torch.no_grad():
        logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits[:, :-1].double()
    own.append(float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), inputs["labels"][:, 1:].flatten())))
    return compute(model, inputs, *more, **options)


trainer.compute_loss = watched
trainer.train()
found = next(row["loss"] for row in trainer.state.log_history if "loss" in row)
print(
    f"| loss of the first step | |\n|---|---|\n| SFTTrainer | {found:.5g} |\n| of the model's own logits | {own[0]:.5g} |"
)
raise SystemExit(int(abs(found - own[0]) > 1e-3))
