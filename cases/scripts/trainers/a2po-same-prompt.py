# TRL 1.16.0: A2POTrainer, rows that share a prompt and not what they are scored by: V* is that of the last such row; filter_all_incorrect drops all of them where one has no reward
# trl/experimental/a2po/a2po_trainer.py:_estimate_optimal_values keys values by the prompt's text. Rewards are the column's here, so that V* is the reward
import copy

import datasets
import transformers
from setup_tiny import options, tiny, tokenizer
from trl.experimental.a2po import A2POConfig, A2POTrainer

ROWS = [{"prompt": "w2 w3", "solution": 1.0}, {"prompt": "w2 w3", "solution": 0.0}, {"prompt": "w4", "solution": 1.0}]


def rewarded(prompts, completions, solution, **_):
    return solution


def trainer(**more):
    sizes = dict(per_device_train_batch_size=3, max_completion_length=2, max_steps=1, num_value_samples=2)
    out = A2POTrainer(
        tiny(),
        rewarded,
        args=A2POConfig(**options(**sizes | more)),
        processing_class=copy.deepcopy(tokenizer),
        train_dataset=datasets.Dataset.from_list(ROWS),
    )
    out.remove_callback(transformers.PrinterCallback)
    return out


kept = trainer(filter_all_incorrect=False)
computed, found = kept.compute_loss, []


def watched(model, inputs, **more):
    found.extend(zip(inputs["rewards"].tolist(), inputs["v_star"].tolist()))
    return computed(model, inputs, **more)


kept.compute_loss = watched
kept.train()
filtered = trainer()
filtered.train()
left = [row["solution"] for row in filtered.train_dataset if row["prompt"] == "w2 w3"]
print("| reward of all of a row's completions | V* | right |\n|---|---|---|")
for reward, value in sorted(found):
    print(f"| {reward} | {value:.3g} | {reward} |")
print(f"\nrows of the shared prompt that are left: {left}, right: [1.0]")
raise SystemExit(int(any(abs(reward - value) > 1e-3 for reward, value in found) or left != [1.0]))
