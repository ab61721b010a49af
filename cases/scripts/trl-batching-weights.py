# TRL 1.16: use_transformers_continuous_batching in GRPO and RLOO casts the trained weights to bfloat16 (bf16, the default) or float16
# before it generates, and leaves them so: mixed precision becomes pure 16 bits, in which a learning rate of 1e-6 moves next to nothing
# Type of the weights at the first optimizer step, and how many of the 6,224 that step changes, at the default learning rate.

import datasets
import transformers
from setup_tiny import options, tiny, tokenizer
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

transformers.utils.logging.set_verbosity_error()


SMALL = dict(num_blocks=16, page_size=16, max_batch_tokens=64)  # the default takes half of the memory


def rewarded(prompts, completion_ids, **_):
    return [float(sum(ids)) for ids in completion_ids]


class Watch(transformers.TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, model=None, **more):
        self.before = [p.detach().clone() for p in model.parameters()]

    def on_optimizer_step(self, args, state, control, model=None, **more):
        self.kind = str(next(model.parameters()).dtype).removeprefix("torch.")
        self.moved = sum(int((p.detach() != b).sum()) for p, b in zip(model.parameters(), self.before))


def run(kind, config, batching):
    sizes = dict(per_device_train_batch_size=4, num_generations=4, max_completion_length=4, max_steps=1, beta=0.0)
    sizes |= dict(use_transformers_continuous_batching=batching, transformers_continuous_batching_config=SMALL)
    args = config(**options(**sizes, bf16=None) | {"learning_rate": 1e-6})
    data = datasets.Dataset.from_list([{"prompt": f"w{2 + i} w3"} for i in range(4)])
    trainer = kind(tiny(), reward_funcs=rewarded, args=args, train_dataset=data, processing_class=tokenizer)
    trainer.remove_callback(transformers.PrinterCallback)
    watch = Watch()
    trainer.add_callback(watch)
    trainer.train()
    return watch.kind, watch.moved


print("| trainer | continuous batching | weights | changed by the step |\n|---|---|---|---|")
bad = 0
for kind, config in ((GRPOTrainer, GRPOConfig), (RLOOTrainer, RLOOConfig)):
    for batching in (False, True):
        dtype, moved = run(kind, config, batching)
        bad += dtype != "float32"
        print(f"| {kind.__name__} | {batching} | {dtype} | {moved} |", flush=True)
raise SystemExit(int(bad > 0))
