import datasets
import torch
from setup_grpo import rewarded
from setup_tiny import options, tiny, tokenizer
from trl import GRPOConfig, GRPOTrainer
from trl.experimental.gmpo import GMPOConfig, GMPOTrainer

IDS = torch.randint(2, 32, (4, 7), generator=torch.Generator().manual_seed(1))
ONES = torch.ones(4, 4, dtype=torch.long)


def norm(kind, config, model=tiny, ratio=None, **own):
    sizes = dict(per_device_train_batch_size=4, num_generations=4, max_completion_length=4, max_steps=1)
    data = datasets.Dataset.from_list([{"prompt": "w2 w3"}] * 4)
    args = config(**options(**sizes | own))
    trainer = kind(model(), reward_funcs=rewarded, args=args, train_dataset=data, processing_class=tokenizer)
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    trainer.use_vllm = ratio is not None
    inputs = dict(prompt_ids=IDS[:, :3], prompt_mask=ONES[:, :3], completion_ids=IDS[:, 3:], completion_mask=ONES)
    inputs |= dict(advantages=torch.tensor([1.0, -1.0, 0.5, -0.5]), num_items_in_batch=torch.tensor(16))
    inputs["old_per_token_logps"] = torch.full((4, 4), -3.4)
    if ratio is not None:
        inputs["importance_sampling_ratio"] = torch.tensor(ratio)[:, None]
    trainer._compute_loss(trainer.model, inputs).backward()
    return torch.stack([p.grad.norm() for p in trainer.model.parameters() if p.grad is not None]).norm().item()


def compared(cases):
    """A table of gradient norms, GRPO's and GMPO's, with each setting off and on; whether one changes nothing in GMPO."""
    alike = False
    print("| gradient norm | GRPO | | GMPO | |\n|---|---|---|---|---|")
    for name, pair in cases.items():
        kinds = (GRPOTrainer, GRPOConfig), (GMPOTrainer, GMPOConfig)
        norms = [norm(*kind, **own) for kind in kinds for own in pair]
        alike |= norms[2] == norms[3]
        print(f"| {name} | " + " | ".join(f"{x:.6g}" for x in norms) + " |")
    return alike
