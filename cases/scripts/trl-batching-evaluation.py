# TRL 1.16: use_transformers_continuous_batching in GRPO and RLOO, evaluation: generation ends with model.train(), so that every batch
# is scored in training mode, and from the second on the batches are the training's own, not the evaluation's
# The prompts of the three evaluation batches and the mode they are scored in; the evaluation's prompts begin with w20, w21, w22.

import datasets
import transformers
from setup_tiny import options, tiny, tokenizer
from trl import GRPOConfig, GRPOTrainer

transformers.utils.logging.set_verbosity_error()


SMALL = dict(num_blocks=16, page_size=16, max_batch_tokens=64)  # the default takes half of the memory


def rewarded(prompts, completions, **_):
    return [float(i) for i in range(len(prompts))]


def run(batching):
    sizes = dict(per_device_train_batch_size=4, num_generations=4, max_completion_length=4, max_steps=1)
    sizes |= dict(steps_per_generation=2)
    sizes |= dict(eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=4)
    sizes |= dict(use_transformers_continuous_batching=batching, transformers_continuous_batching_config=SMALL)
    trainer = GRPOTrainer(
        tiny(),
        reward_funcs=rewarded,
        args=GRPOConfig(**options(**sizes)),
        train_dataset=datasets.Dataset.from_list([{"prompt": f"w{2 + i} w3"} for i in range(8)]),
        eval_dataset=datasets.Dataset.from_list([{"prompt": f"w{20 + i} w3"} for i in range(3)]),
        processing_class=tokenizer,
    )
    trainer.remove_callback(transformers.PrinterCallback)
    seen, loss = [], trainer._compute_loss

    def watched(model, inputs):
        prompts = sorted(set(tokenizer.batch_decode(inputs["prompt_ids"])))
        seen.append((prompts, "training" if model.training else "evaluation"))
        return loss(model, inputs)

    trainer._compute_loss = watched
    trainer.train()
    logged = [name for row in trainer.state.log_history for name in row if name.endswith("reward")]
    return seen[1:], logged


print("| continuous batching | prompts, mode of each evaluation batch | logged |\n|---|---|---|")
for batching in (False, True):
    seen, logged = run(batching)
    print(f"| {batching} | {'; '.join(f'{p}, {mode}' for p, mode in seen)} | {logged} |", flush=True)
raise SystemExit(int(any(mode == "training" for _, mode in seen)))
