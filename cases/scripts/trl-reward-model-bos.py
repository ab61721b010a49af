# TRL 1.16: texts that are no conversations lose the <bos> of the reward model's tokenizer in GRPO, RLOO and online DPO
# They tokenize with add_special_tokens=False, meant for what a chat template wrote; RewardTrainer trains the model with <bos>.
import datasets
import transformers
from setup_begun import quiet, read_first, tokenizer
from setup_tiny import tiny
from trl import GRPOConfig, GRPOTrainer, RewardConfig, RewardTrainer, RLOOConfig, RLOOTrainer
from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer

size = dict(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
judge = transformers.LlamaForSequenceClassification(transformers.LlamaConfig(**size, num_labels=1, pad_token_id=0))
judge.config.eos_token_id = 1
pairs = datasets.Dataset.from_list([{"prompt": "w3 w4 ", "chosen": " w5", "rejected": " w6"}] * 2)
prompts = pairs.select_columns("prompt")
given = dict(processing_class=tokenizer)
rewarded = given | dict(train_dataset=prompts, reward_funcs=judge, reward_processing_classes=tokenizer)
group = dict(num_generations=2, max_completion_length=4, beta=0.0)
MADE = {
    "RewardTrainer": lambda: RewardTrainer(judge, args=quiet(RewardConfig), train_dataset=pairs, **given),
    "GRPO": lambda: GRPOTrainer(tiny(), args=quiet(GRPOConfig, **group), **rewarded),
    "RLOO": lambda: RLOOTrainer(tiny(), args=quiet(RLOOConfig, **group), **rewarded),
    "online DPO": lambda: OnlineDPOTrainer(tiny(), tiny(), args=quiet(OnlineDPOConfig, max_new_tokens=4), **rewarded),
}
bad = False
print("| trainer | the reward model reads first | right |\n|---|---|---|")
for name, make in MADE.items():
    found = read_first(make(), judge)
    bad |= "<bos>" not in found
    print(f"| {name} | {found} | <bos> w3 w4 |")
raise SystemExit(int(bad))
