"""GRPO and RLOO leave a reward model, DPO and KTO a ref_model, in training mode, where they find it in it: its dropout is on.

One that was built or just trained is; OnlineDPO calls eval() of both.
"""

import datasets
import torch
import transformers
from setup_lora import model
from setup_self import saved
from setup_tiny import PAIRS, options, tiny, tokenizer
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer

SIZE = dict(n_embd=16, n_layer=2, n_head=2, vocab_size=32, pad_token_id=0, eos_token_id=1)
INPUTS = tokenizer(["w2 w3 w4"] * 8, return_tensors="pt")
prompts = datasets.Dataset.from_list([{"prompt": "w2 w3"}] * 4)


def gpt2(kind, **more):
    return model(lambda: kind(transformers.GPT2Config(**SIZE, **more)).train())


def spread(other):
    """The largest deviation of the outputs for eight texts that are the same."""
    with torch.no_grad():
        return float(other(**INPUTS).logits.std(0).max())


found = {}
for kind, config in ((GRPOTrainer, GRPOConfig), (RLOOTrainer, RLOOConfig), (OnlineDPOTrainer, OnlineDPOConfig)):
    reward = gpt2(transformers.GPT2ForSequenceClassification, num_labels=1)
    sizes = {} if kind is OnlineDPOTrainer else {"num_generations": 2}
    args = config(**options(per_device_train_batch_size=4, **sizes))
    given = {"reward_funcs": reward, "reward_processing_classes": tokenizer}
    trainer = kind(saved(tiny()), args=args, train_dataset=prompts, processing_class=tokenizer, **given)
    found[f"{kind.__name__}, reward model"] = spread(trainer.reward_funcs[0])
reference = gpt2(transformers.GPT2LMHeadModel)
args = DPOConfig(**options(disable_dropout=False))
data = datasets.Dataset.from_list(PAIRS)
trainer = DPOTrainer(saved(tiny()), reference, args=args, train_dataset=data, processing_class=tokenizer)
found["DPOTrainer, ref_model, disable_dropout=False"] = spread(trainer.ref_model)
print("| model that was handed over in training mode | deviation of one text's output, right: 0 |\n|---|---|")
print(*(f"| {name} | {value:.4g} |" for name, value in found.items()), sep="\n")
raise SystemExit(int(max(found.values()) > 1e-5))
