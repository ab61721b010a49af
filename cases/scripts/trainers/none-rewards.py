"""Online DPO takes completions that no reward function scores (None, "not applicable") as ones of reward 0.

Where both of a prompt are, the second is preferred; SDPO does the like (`trl-sdpo-none-rewards`), GRPO and RLOO leave them out.
"""

import datasets
import transformers
from setup_self import saved
from setup_tiny import options, tiny, tokenizer
from trl import GRPOConfig, GRPOTrainer
from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer

KINDS = ((GRPOTrainer, GRPOConfig, {"num_generations": 4}), (OnlineDPOTrainer, OnlineDPOConfig, {}))
prompts = datasets.Dataset.from_list([{"prompt": "w2"}] * 4)
print("| every reward None | a weight moves in a step of rate 0.01 by, right: 0 |\n|---|---|")
bad = False
for kind, config, more in KINDS:
    args = config(**options(per_device_train_batch_size=4, max_steps=1, **more) | {"learning_rate": 1e-2})
    policy, reward = saved(tiny()), lambda completions, **_: [None] * len(completions)
    given = dict(args=args, train_dataset=prompts, processing_class=tokenizer)
    trainer = kind(policy, reward_funcs=reward, **given)
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    moved = max(float((a - b).abs().max()) for a, b in zip(policy.parameters(), tiny().parameters()))
    bad |= moved > 1e-6
    print(f"| {kind.__name__} | {moved:.3g} |")
raise SystemExit(int(bad))
