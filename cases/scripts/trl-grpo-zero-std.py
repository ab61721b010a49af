# TRL 1.16: GRPO's frac_reward_zero_std, the share of completions whose prompt's rewards are all alike, is made of the batch's
# deviation with scale_rewards="batch" or normalize_then_sum: it is 0 unless the whole batch is alike
import datasets
import transformers
from setup_tiny import options, tiny, tokenizer
from trl import GRPOConfig, GRPOTrainer

transformers.utils.logging.set_verbosity_error()
REWARDS = [1.0, 1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0]  # of three of four prompts all alike
prompts = datasets.Dataset.from_list([{"prompt": f"w{i}"} for i in range(2, 6)])
KINDS = [dict(scale_rewards=name) for name in ("group", "none", "batch")]
KINDS += [dict(multi_objective_aggregation="normalize_then_sum")]


def logged(**more):
    sizes = dict(per_device_train_batch_size=8, num_generations=2, max_completion_length=4, max_steps=1)
    args = GRPOConfig(**options(**sizes, **more | dict(logging_strategy="steps", logging_steps=1)))
    trainer = GRPOTrainer(tiny(), lambda completions, **_: REWARDS, args, prompts, processing_class=tokenizer)
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    return trainer.state.log_history[0]["frac_reward_zero_std"]


print("| setting | frac_reward_zero_std | right |\n|---|---|---|")
found = [logged(**kind) for kind in KINDS]
for kind, value in zip(KINDS, found):
    print(f"| {kind} | {value} | 0.75 |")
raise SystemExit(int(any(value != 0.75 for value in found)))
