# peft 0.21.2, AdaLoRA with transformers 5.23.0's Trainer or TRL 1.16.0's SFT: eval_loss has the orthogonality term, gradient accumulation adds it for each micro-batch, and a loss that TRL computes itself lacks it
# peft/tuners/adalora/model.py:AdaLoraModel.forward adds orth_reg_weight (0.5) times the term to outputs.loss, in evaluation too; the Trainer's loss is a sum over micro-batches
import datasets
import peft
import torch
import transformers
import trl
from setup_processes import Keep
from setup_tiny import options, tiny, tokenizer

ROWS = [dict(input_ids=list(range(2 + i, 9 + i)), labels=list(range(2 + i, 9 + i))) for i in range(4)]
PLAIN = transformers.Trainer, transformers.TrainingArguments
SFT = trl.SFTTrainer, trl.SFTConfig


def run(kind, config, size, weight, data=ROWS, **more):
    """Loss of the evaluation and of a step, and the gradient's norm."""
    torch.manual_seed(0)
    given = dict(target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], total_step=100, orth_reg_weight=weight)
    model = peft.get_peft_model(tiny(), peft.AdaLoraConfig(task_type="CAUSAL_LM", **given))
    wanted = dict(per_device_train_batch_size=size, gradient_accumulation_steps=4 // size, max_steps=1, logging_steps=1)
    args = config(**options(**wanted | dict(logging_strategy="steps")))
    keep = Keep()
    trainer = kind(model, args, train_dataset=data, eval_dataset=data, callbacks=[keep], **more)
    trainer.remove_callback(transformers.PrinterCallback)
    evaluated = trainer.evaluate()["eval_loss"]
    trainer.train()
    return evaluated, next(row["loss"] for row in trainer.state.log_history if "loss" in row), keep.norms[-1]


transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
text = dict(data=datasets.Dataset.from_list([dict(input_ids=row["input_ids"]) for row in ROWS]))
text |= dict(processing_class=tokenizer)
print("| trainer | orth_reg_weight | micro-batches | eval_loss | loss of the step | gradient norm |")
print("|---|---|---|---|---|---|")
found = {}
for name, kinds, more in (("Trainer", PLAIN, {}), ("SFT", SFT, text)):
    for weight, size in ((0.0, 4), (0.5, 4), (0.5, 1)):
        found[name, weight, size] = run(*kinds, size, weight, **more)
        values = " | ".join(f"{value:.4f}" for value in found[name, weight, size])
        print(f"| {name} | {weight} | {4 // size} | {values} |")
none, whole, parts = (found["Trainer", *key] for key in ((0.0, 4), (0.5, 4), (0.5, 1)))
lacking = found["SFT", 0.5, 4] == found["SFT", 0.0, 4]
raise SystemExit(int(whole[0] > none[0] + 0.1 or parts[1] > whole[1] + 0.1 or lacking))
