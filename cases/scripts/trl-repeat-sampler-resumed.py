# TRL 1.16: GRPO and RLOO, resumed after the first epoch, draw the order of the first epoch again: RepeatSampler has no set_epoch,
# and its generator is in no checkpoint. Some prompts of an epoch are trained on twice, others never
# Three epochs of eight prompts, and the same run resumed in the middle of the second. DPO's sampler is transformers'.
import tempfile

import datasets
import transformers
from setup_grpo import rewarded
from setup_self import saved
from setup_tiny import options, tiny, tokenizer
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

transformers.utils.logging.set_verbosity_error()
ROWS = [{"prompt": f"w{i}", "chosen": " w20", "rejected": " w21"} for i in range(2, 10)]


def run(kind, config, folder, resume=None):
    paired, order = kind is DPOTrainer, []
    few = dict(per_device_train_batch_size=1)
    if not paired:
        few = dict(num_generations=2, per_device_train_batch_size=2, max_completion_length=4, beta=0.0)
    more = dict(num_train_epochs=3, save_strategy="steps", save_steps=12, output_dir=folder)

    class Seen(kind):
        def _compute_loss(self, model, inputs, *rest):
            order.append(int(inputs["input_ids"][0, 0] if paired else inputs["prompt_ids"][0, -1]) - 1)
            return super()._compute_loss(model, inputs, *rest)

    trainer = Seen(
        saved(tiny()),
        args=config(**options(**few | more)),
        train_dataset=datasets.Dataset.from_list(ROWS),
        processing_class=tokenizer,
        **{} if paired else {"reward_funcs": rewarded},
    )
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train(resume_from_checkpoint=resume)
    return order


bad = False
print("| trainer | run | second epoch | never seen in it | third epoch |\n|---|---|---|---|---|")
for kind, config in ((GRPOTrainer, GRPOConfig), (RLOOTrainer, RLOOConfig), (DPOTrainer, DPOConfig)):
    folder = tempfile.mkdtemp()
    whole = run(kind, config, folder)
    resumed = whole[:12] + run(kind, config, folder, f"{folder}/checkpoint-12")
    for name, order in (("whole", whole), ("resumed", resumed)):
        print(
            f"| {kind.__name__} | {name} | {order[8:16]} | {sorted({*range(1, 9)} - {*order[8:16]})} | {order[16:]} |"
        )
    bad |= whole != resumed
raise SystemExit(int(bad))
