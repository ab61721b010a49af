# TRL 1.16: GMPO has no code for the sampler's importance ratio, entropy_coef, off_policy_mask_threshold and router_aux_loss_coef
# GMPOConfig "inherits every parameter from GRPOConfig; it only changes the meaning and default of the clipping range".
import datasets
import torch
from setup_grpo import rewarded
from setup_tiny import experts, options, tiny, tokenizer
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


CASES = {
    "sampler's ratios 1; 0, 1, 0, 1": [dict(ratio=[1.0] * 4), dict(ratio=[0.0, 1.0, 0.0, 1.0])],
    "entropy_coef 0; 1": [dict(entropy_coef=0.0), dict(entropy_coef=1.0)],
    "off_policy_mask_threshold None; 1e-6": [{}, dict(off_policy_mask_threshold=1e-6)],
    "experts, router_aux_loss_coef 0; 1": [dict(model=experts, router_aux_loss_coef=c) for c in (0.0, 1.0)],
}
print("| gradient norm | GRPO | | GMPO | |\n|---|---|---|---|---|")
bad = False
for name, pair in CASES.items():
    grpo = [norm(GRPOTrainer, GRPOConfig, **own) for own in pair]
    gmpo = [norm(GMPOTrainer, GMPOConfig, **own) for own in pair]
    bad |= gmpo[0] == gmpo[1]
    print(f"| {name} | " + " | ".join(f"{x:.6g}" for x in grpo + gmpo) + " |")
raise SystemExit(int(bad))
