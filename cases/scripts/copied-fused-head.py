# trl 1.16: a copy of a model that another trainer has had computes with the weights of the original
# add_fused_lm_head closes over the bound forward of the model; copy.deepcopy keeps it, and so does create_reference_model.
import copy

import datasets
import torch
from setup_online import online
from setup_tiny import options, tiny, tokenizer
from trl import SFTConfig, SFTTrainer


def had(model):
    """The model, after a trainer was given it."""
    data = datasets.Dataset.from_list([{"text": "w2 w3 w4"}] * 4)
    SFTTrainer(model, args=SFTConfig(**options(max_steps=1)), train_dataset=data, processing_class=tokenizer)
    return model


def moves(model):
    """How far the logits of a copy move with the weights of the original."""
    ids, copied = torch.arange(2, 10)[None], copy.deepcopy(model)
    with torch.no_grad():
        before = copied(input_ids=ids).logits
        for p in model.parameters():
            p.mul_(2)
        return float((copied(input_ids=ids).logits - before).abs().max())


def kl(model):
    """What online DPO, which copies the model for its reference, logs at its third step."""
    trainer = online(model, None, learning_rate=0.1, logging_strategy="steps", logging_steps=1)
    trainer.train()
    return [row["objective/kl"] for row in trainer.state.log_history if "objective/kl" in row][-1]


print("| model | the copy's logits move by | objective/kl of online DPO, step 3 |\n|---|---|---|")
found = {}
for name, made in (("fresh", tiny), ("had by SFTTrainer", lambda: had(tiny()))):
    found[name] = moves(made()), kl(made())
    print(f"| {name} | {found[name][0]:.3g} | {found[name][1]:.3g} |")
raise SystemExit(int(found["had by SFTTrainer"][0] > 0))
