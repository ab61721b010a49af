# TRL 1.16: online DPO generates and trains without <bos> where prompts are no conversations; GRPO and DPO do so with it
# It tokenizes with add_special_tokens=False, meant for what a chat template wrote.
import datasets
from setup_begun import quiet, read_first, tokenizer
from setup_tiny import tiny
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer
from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer

pairs = datasets.Dataset.from_list([{"prompt": "w3 w4", "chosen": " w5", "rejected": " w6"}] * 2)
given = dict(processing_class=tokenizer)
asked = given | dict(train_dataset=pairs.select_columns("prompt"), reward_funcs=lambda completions, **_: [1.0, 2.0])
group = dict(num_generations=2, max_completion_length=4)


def online(model):
    args = quiet(OnlineDPOConfig, max_new_tokens=4)
    return OnlineDPOTrainer(model, tiny(), args=args, **asked | dict(reward_funcs=lambda completions, **_: [1.0] * 4))


MADE = {
    "DPO": lambda model: DPOTrainer(model, tiny(), args=quiet(DPOConfig), train_dataset=pairs, **given),
    "GRPO": lambda model: GRPOTrainer(model, args=quiet(GRPOConfig, **group), **asked),
    "online DPO": online,
}
bad = False
print("| trainer | the policy reads first | right |\n|---|---|---|")
for name, make in MADE.items():
    model = tiny()
    found = read_first(make(model), model)
    bad |= "<bos>" not in found
    print(f"| {name} | {found} | <bos> w3 w4 |")
raise SystemExit(int(bad))
