# TRL 1.16: with sync_ref_model a resumed run begins again with the initial reference: the synchronised one is in no checkpoint
# DPO, of four steps, and the same run resumed behind step 2. KTO, GRPO and RLOO share the callback.
import tempfile

import datasets
import transformers
from setup_self import saved
from setup_tiny import PAIRS, options, tiny, tokenizer
from trl import DPOConfig, DPOTrainer

transformers.utils.logging.set_verbosity_error()
folder, start = tempfile.mkdtemp(), tiny().lm_head.weight.detach()


class Watch(transformers.TrainerCallback):
    def __init__(self, *models):
        self.models, self.seen = models, {}

    def on_step_begin(self, args, state, control, **more):
        heads = (model.lm_head.weight.detach() for model in self.models)
        self.seen[state.global_step + 1] = [float((head - start).norm()) for head in heads]


def run(resume=None):
    more = dict(
        learning_rate=1e-2, lr_scheduler_type="constant", save_strategy="steps", save_steps=2, output_dir=folder
    )
    more |= dict(sync_ref_model=True, ref_model_sync_steps=1, ref_model_mixup_alpha=0.5)
    args = DPOConfig(**options(per_device_train_batch_size=2, max_steps=4) | more)
    data = datasets.Dataset.from_list(PAIRS)
    trainer = DPOTrainer(saved(tiny()), args=args, train_dataset=data, processing_class=tokenizer)
    trainer.remove_callback(transformers.PrinterCallback)
    watch = Watch(trainer.model, trainer.ref_model)
    trainer.add_callback(watch)
    trainer.train(resume_from_checkpoint=resume)
    return watch.seen


whole, resumed = run(), run(f"{folder}/checkpoint-2")
print("| distance to the initial model | policy | reference |\n|---|---|---|")
for name, seen in (("whole run", whole), ("resumed", resumed)):
    for step in (3, 4):
        print(f"| {name}, step {step} | {seen[step][0]:.5g} | {seen[step][1]:.5g} |")
raise SystemExit(int(abs(whole[3][1] - resumed[3][1]) > 1e-4))
