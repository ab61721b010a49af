# TRL 1.16: the column "tools" of a dataset has no effect in CPO, ORPO, GKD and GOLD; DPO and SFT hand it to the chat template
# The model is trained on calls of tools that its prompt does not name.
import datasets
from setup_distilled import made, words
from setup_tiny import options, tiny, tokenizer
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.gkd import GKDConfig, GKDTrainer
from trl.experimental.gold import GOLDConfig, GOLDTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

tokenizer.chat_template = "{% for t in tools or [] %}{{ t.function.name + ' ' }}{% endfor %}{% for m in messages %}{{ m.content + ' ' }}{% endfor %}"
TOOL = [{"type": "function", "function": {"name": "w9", "description": "", "parameters": {"type": "object"}}}]
said = {
    name: [{"role": role, "content": words(ids)}]
    for name, role, ids in (("prompt", "user", [2, 3]), ("chosen", "assistant", [4]), ("rejected", "assistant", [5]))
}
pair, answer = said | {"tools": TOOL}, {"prompt": said["prompt"], "completion": said["chosen"], "tools": TOOL}
turns = {"messages": said["prompt"] + said["chosen"], "tools": TOOL}
KINDS = [
    (SFTTrainer, SFTConfig, turns),
    (DPOTrainer, DPOConfig, pair),
    (CPOTrainer, CPOConfig, pair),
    (ORPOTrainer, ORPOConfig, pair),
    (GKDTrainer, GKDConfig, turns),
    (GOLDTrainer, GOLDConfig, answer),
]
bad = False
print("| trainer | sequence | right |\n|---|---|---|")
for kind, config, row in KINDS:
    if kind in (GKDTrainer, GOLDTrainer):
        trainer = made(
            kind, config, [row], 1, **({"lmbda": 0.0, "use_extended_uld": False} if kind is GOLDTrainer else {})
        )
    else:
        data = datasets.Dataset.from_list([row] * 2)
        args = config(**options(per_device_train_batch_size=1))
        reference = {"ref_model": tiny()} if kind is DPOTrainer else {}
        trainer = kind(tiny(), args=args, train_dataset=data, processing_class=tokenizer, **reference)
    batch = next(iter(trainer.get_train_dataloader()))
    ids = batch["input_ids" if "input_ids" in batch else "chosen_input_ids"][0]
    found = tokenizer.decode([i for i in ids.tolist() if i])
    bad |= "w9" not in found
    print(f"| {kind.__name__} | {found} | w9 w2 w3 w4 |")
raise SystemExit(int(bad))
