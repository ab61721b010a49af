"""TrainingArguments: "data_seed: Random seed to be used with data samplers"; the trainers' RepeatSampler takes `seed`, and shuffles
where train_sampling_strategy is "sequential". Whether the order of the training data changes with each."""

import datasets
import transformers
from setup_distilled import tokenized
from setup_self import saved
from setup_tiny import options, tiny, tokenizer
from trl import (
    DistillationConfig,
    DistillationTrainer,
    GRPOConfig,
    GRPOTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)
from trl.experimental.gold import GOLDConfig, GOLDTrainer
from trl.experimental.sdpo import SDPOConfig, SDPOTrainer

transformers.utils.logging.set_verbosity_error()
PROMPTS = datasets.Dataset.from_list([{"prompt": f"w{2 + i} w3"} for i in range(16)])
IDS = datasets.Dataset.from_list([tokenized([2 + i, 3], [4, 5]) for i in range(16)])


def rewarded(prompts, completions, **_):
    return [0.0] * len(prompts)


def order(kind, config, *given, data=PROMPTS, **more):
    args = config(**options(per_device_train_batch_size=2, max_steps=1, **more))
    model = saved(tiny())
    if kind in (GOLDTrainer, DistillationTrainer):
        given = (saved(tiny(1)),)
    trainer = kind(model, *given, args=args, train_dataset=data, processing_class=tokenizer)
    seen = []
    for batch in trainer.get_train_dataloader():
        seen += [row["prompt"] for row in batch] if isinstance(batch, list) else batch["input_ids"].tolist()
    return seen


two = dict(num_generations=2)
CHANGES = {"seed": 7}, {"data_seed": 7}, {"train_sampling_strategy": "sequential"}
CASES = [
    (SFTTrainer, SFTConfig, (), dict(data=IDS)),
    (GRPOTrainer, GRPOConfig, (rewarded,), two),
    (RLOOTrainer, RLOOConfig, (rewarded,), two),
    (DistillationTrainer, DistillationConfig, (), {}),
    (SDPOTrainer, SDPOConfig, (rewarded,), two),
    (GOLDTrainer, GOLDConfig, (), dict(data=IDS)),
]
print("| trainer | seed | data_seed | train_sampling_strategy |\n|---|---|---|---|")
bad = 0
for kind, config, given, own in CASES:
    plain = order(kind, config, *given, **own)
    assert plain == order(kind, config, *given, **own)
    moved = [order(kind, config, *given, **own, **more) != plain for more in CHANGES]
    bad += not all(moved)
    print(f"| {kind.__name__} | " + " | ".join("another order" if m else "no effect" for m in moved) + " |")
raise SystemExit(int(bad > 0))
