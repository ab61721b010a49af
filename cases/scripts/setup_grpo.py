import datasets
import torch
from setup_tiny import options, tokenizer
from trl import GRPOConfig, GRPOTrainer


def rewarded(prompts, completions, **kwargs):
    return [float(len(set(completion))) + i for i, completion in enumerate(completions)]


def banning(model, value):
    """The model with a bias on its LM head that bans token 31; -inf and -1e4 give it the same probability, 0."""
    head = torch.nn.Linear(16, 32)
    head.weight = model.lm_head.weight
    head.bias.data.zero_()
    head.bias.data[31] = value
    model.lm_head = head
    return model


def grpo(model, **more):
    settings = dict(per_device_train_batch_size=4, num_generations=4, max_completion_length=4, max_steps=3)
    settings |= dict(logging_strategy="steps", logging_steps=1, learning_rate=1e-3)
    return GRPOTrainer(
        model,
        reward_funcs=rewarded,
        args=GRPOConfig(**options(**settings | more)),
        train_dataset=datasets.Dataset.from_list([{"prompt": f"w{2 + i} w3"} for i in range(16)]),
        processing_class=tokenizer,
    )


def logged(trainer, *names):
    """What the trainer logs under these names, a list a step."""
    torch.manual_seed(0)
    trainer.train()
    rows = [row for row in trainer.state.log_history if "grad_norm" in row]
    return [["nan" if row.get(name) is None else f"{row[name]:.6g}" for name in names] for row in rows]
