# transformers 5.23.0: optim "galore_adamw", "apollo_adamw": `weight_decay` has no effect, nor adam_beta1, adam_beta2, adam_epsilon (GaLore; APOLLO: outside optim_target_modules); "stable_adamw" with optim_args="decouple_lr=False,kahan_sum=False": both are True
# transformers/trainer_optimizer.py:_setup_low_rank_optimizer makes its own groups, without a decay; _get_stable_adamw calls bool() on the text; the optimizers' classes stand in here: only what they are given is looked at
import importlib
import sys
import types

import torch
import transformers
from setup_tiny import options, tiny

optimizers = importlib.import_module("transformers.trainer_optimizer")


class Adam(torch.optim.Optimizer):
    """The defaults of the classes of galore_torch 1.0, apollo_torch 1.0.3 and torch-optimi 0.3.3."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.0, **more):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay) | more)


galore = dict.fromkeys(("GaLoreAdafactor", "GaLoreAdamW", "GaLoreAdamW8bit"), Adam)
sys.modules["galore_torch"] = types.SimpleNamespace(**galore)
sys.modules["apollo_torch"] = types.SimpleNamespace(APOLLOAdamW=Adam)
sys.modules["optimi"] = types.SimpleNamespace(StableAdamW=Adam)
for name in ("galore_torch", "apollo_torch", "torch_optimi"):
    setattr(optimizers, f"is_{name}_available", lambda: True)


def group(name, parameter, **more):
    """The optimizer's group of a parameter of the model."""
    wanted = dict(optim=name, weight_decay=0.1, adam_beta1=0.8, adam_beta2=0.95, adam_epsilon=1e-5) | more
    args = transformers.TrainingArguments(**options(**wanted))
    trainer = transformers.Trainer(tiny(), args)
    found = trainer.model.get_parameter(parameter)
    return next(one for one in trainer.create_optimizer().param_groups if any(p is found for p in one["params"]))


LAYER = "model.layers.0.{}_proj.weight"
print("| optim | of | weight_decay, given 0.1 | betas, given 0.8, 0.95 | eps, given 1e-5 |\n|---|---|---|---|---|")
wrong = False
for name in ("adamw_torch", "galore_adamw", "apollo_adamw", "stable_adamw"):
    more = {} if "adamw_torch" in name or "stable" in name else dict(optim_target_modules=["mlp"])
    for told, parameter in (("mlp", LAYER.format("mlp.up")), ("attention", LAYER.format("self_attn.q"))):
        one = group(name, parameter, **more)
        print(f"| {name} | {told} | {one['weight_decay']} | {one['betas']} | {one['eps']} |")
        wrong |= one["weight_decay"] != 0.1
asked = dict(optim_args="decouple_lr=False,kahan_sum=False")
one = group("stable_adamw", LAYER.format("mlp.up"), **asked)
print("\n| stable_adamw, optim_args | decouple_lr | kahan_sum |\n|---|---|---|")
print(f"| decouple_lr=False,kahan_sum=False | {one['decouple_lr']} | {one['kahan_sum']} |")
raise SystemExit(int(wrong or one["decouple_lr"]))
