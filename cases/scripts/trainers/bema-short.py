# TRL 1.16.0: BEMACallback, the defaults, fewer than update_freq (400) steps: the model that it saves is the initial one; of a longer run it is that of the last multiple of 400
# trl/trainer/callbacks.py:BEMACallback.on_train_end saves without an update. How far the saved model is from the initial and the trained one
import datasets
import torch
import transformers
from setup_tiny import options, tiny, tokenizer
from trl import BEMACallback, SFTConfig, SFTTrainer

transformers.utils.logging.disable_progress_bar()
datasets.disable_progress_bars()


def distance(one, other):
    return float(
        torch.stack([(a - b).abs().max() for a, b in zip(one.parameters(), other.parameters())]).max().detach()
    )


def saved(steps):
    args = options(max_steps=steps, learning_rate=1e-3, per_device_train_batch_size=1, gradient_checkpointing=False)
    args = SFTConfig(**args | dict(lr_scheduler_type="constant"))
    data = datasets.Dataset.from_list([{"text": f"w{2 + i} w{9 + i} w4"} for i in range(16)])
    given = dict(train_dataset=data, processing_class=tokenizer, callbacks=[BEMACallback()])
    trainer = SFTTrainer(tiny(), args=args, **given)
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    return trainer.model, transformers.AutoModelForCausalLM.from_pretrained(f"{args.output_dir}/bema")


bad = False
print("| steps | saved, from the initial model | from the trained one |\n|---|---|---|")
for steps in (399, 400):
    model, average = saved(steps)
    moved = distance(average, tiny())
    bad |= moved == 0
    print(f"| {steps} | {moved:.3g} | {distance(average, model):.3g} |")
raise SystemExit(int(bad))
