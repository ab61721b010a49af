import datasets
import torch
import transformers
from setup_tiny import PAIRS, options, tiny, tokenizer


def model(made=tiny):
    """A tiny model whose weights are large enough that a part of them shows."""
    torch.manual_seed(0)
    out = made()
    with torch.no_grad():
        for parameter in out.parameters():
            parameter.mul_(4)
    return out


def logged(kind, config, policy, peft_config=None, **more):
    """What a trainer over the pairs logs of each step."""
    wanted = dict(per_device_train_batch_size=4, max_steps=1, logging_strategy="steps", logging_steps=1) | more
    data = datasets.Dataset.from_list(PAIRS)
    given = dict(train_dataset=data, processing_class=tokenizer, peft_config=peft_config)
    trainer = kind(policy, args=config(**options(**wanted)), **given)
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    return [row for row in trainer.state.log_history if "loss" in row]
