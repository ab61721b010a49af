# TRL 1.16.0: MergeModelCallback, MergeConfig("ties") or ("dare_ties"): the merged model is the initial one, nothing of the training is left
# trl/experimental/merge_model_callback.py:MergeConfig.create_merge_config_ties names the policy as base_model, so that its own change is 0 and the target's takes it back; mergekit 0.1.5's method is written out here, where it shows the same
import torch
from setup_tiny import tiny
from trl.experimental import merge_model_callback


class Configuration:
    """mergekit's own checks what it is given."""

    @staticmethod
    def model_validate(given):
        return given


merge_model_callback.is_mergekit_available = lambda: True
merge_model_callback.MergeConfiguration = Configuration


def merged(method, models):
    """TIES of arXiv 2306.01708 as mergekit has it: changes from the base, trimmed, elected by sign, averaged. `models`: path -> weights."""
    config = merge_model_callback.MergeConfig(method)
    config.policy_model_path, config.target_model_path = "policy", "target"
    made = config.create()
    if method == "linear":
        weights = {one["model"]: one["parameters"]["weight"] for one in made["models"]}
        return {name: sum(w * models[path][name] for path, w in weights.items()) for name in models["policy"]}
    base = models[made["base_model"]["model"]["path"]]
    result = {}
    for name, start in base.items():
        changes, weights = [], []
        for one in made["models"]:
            path, given = one["model"]["model"]["path"], one["parameters"]
            if models[path] is base:
                continue  # mergekit takes it for the base alone
            change = models[path][name] - start
            kept = max(1, round(change.numel() * given["density"][0]))  # a gradient over layers: the first
            least = change.abs().flatten().topk(kept).values[-1]
            changes.append(given["weight"] * torch.where(change.abs() >= least, change, 0.0))
            weights.append(given["weight"])
        changes, weights = torch.stack(changes), torch.tensor(weights)[:, *[None] * start.dim()]
        mask = changes.sign() == changes.sum(0).sign()
        result[name] = start + (changes * mask).sum(0) / (weights * mask).sum(0).clamp(min=1e-9)
    return result


def distance(one, two):
    return sum(float((one[name] - two[name]).square().sum()) for name in one) ** 0.5


target, policy = ({name: value.clone() for name, value in tiny().state_dict().items()} for _ in range(2))
torch.manual_seed(1)
for value in policy.values():
    value += 0.05 * torch.randn_like(value)  # what training did
models = {"policy": policy, "target": target}
print("| MergeConfig | from the initial model | from the trained one | these are apart |\n|---|---|---|---|")
wrong = False
for method in ("linear", "ties", "dare_ties"):
    found = merged(method, models)
    start, end, whole = distance(found, target), distance(found, policy), distance(target, policy)
    print(f"| {method} | {start:.4f} | {end:.4f} | {whole:.4f} |")
    wrong |= start < 1e-3 * whole
raise SystemExit(int(wrong))
