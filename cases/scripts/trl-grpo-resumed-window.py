# TRL 1.16: GRPO and RLOO, resumed between two generations, begin a generation's steps anew there: prompts of the one that was cut
# are trained on too often, those of the last one too seldom
# Twelve prompts, two completions each, four steps a generation; resumed behind step 6 of 12.
import collections
import tempfile

import datasets
import transformers
from setup_grpo import rewarded
from setup_self import saved
from setup_tiny import options, tiny, tokenizer
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

transformers.utils.logging.set_verbosity_error()
PROMPTS = [{"prompt": f"w{i}"} for i in range(2, 14)]


def run(kind, config, folder, resume=None):
    sizes = dict(per_device_train_batch_size=2, num_generations=2, steps_per_generation=4, max_completion_length=4)
    more = dict(num_train_epochs=1, save_strategy="steps", save_steps=6, beta=0.0, shuffle_dataset=False)
    steps = []

    class Seen(kind):
        def _compute_loss(self, model, inputs):
            steps.append([int(i) - 1 for i in inputs["prompt_ids"][:, -1]])
            return super()._compute_loss(model, inputs)

    args = config(**options(output_dir=folder, **sizes | more))
    data = datasets.Dataset.from_list(PROMPTS)
    trainer = Seen(saved(tiny()), rewarded, args, data, processing_class=tokenizer)
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train(resume_from_checkpoint=resume)
    return steps


bad = False
print("| trainer | run | completions of each prompt that are trained on |\n|---|---|---|")
for kind, config in ((GRPOTrainer, GRPOConfig), (RLOOTrainer, RLOOConfig)):
    folder = tempfile.mkdtemp()
    whole = run(kind, config, folder)
    for name, steps in (("whole", whole), ("resumed", whole[:6] + run(kind, config, folder, f"{folder}/checkpoint-6"))):
        seen = collections.Counter(prompt for step in steps for prompt in step)
        counts = [seen[i] for i in range(1, 13)]
        print(f"| {kind.__name__} | {name} | {counts} |")
        bad |= counts != [2] * 12
raise SystemExit(int(bad))
