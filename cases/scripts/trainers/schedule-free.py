# transformers 5.23.0: optim "schedule_free_adamw", "_sgd" or "_radam": checkpoints and the model that is left hold the point of the gradients, not the average; with warmup_steps below 1, a ratio, the first step is 1/ratio as large
# transformers/trainer.py:Trainer calls optimizer.eval() in evaluation_loop alone, and trainer_optimizer.py:_get_schedule_free_optimizer hands on args.warmup_steps; written out: schedulefree 1.4.1's AdamWScheduleFree, which wants eval() before it is saved
import sys
import tempfile
import types

import safetensors.torch
import torch
import transformers
import transformers.trainer_optimizer
from setup_tiny import options, tiny

ROWS = [dict(input_ids=torch.arange(2, 9) + i, labels=torch.arange(2, 9) + i) for i in range(8)]


class ScheduleFree(torch.optim.Optimizer):
    """AdamWScheduleFree without its decay: `eval` makes p the average x, `train` the point y of the gradients."""

    def __init__(self, params, lr, betas, eps, warmup_steps=0, **_):
        super().__init__(
            params, dict(lr=lr, betas=betas, eps=eps, warmup=warmup_steps, mode=False, k=0, sum=0.0, top=0.0)
        )

    @torch.no_grad()
    def moved(self, train):
        for group in self.param_groups:
            b = group["betas"][0]
            for p in group["params"] if group["mode"] != train else ():
                if p in self.state:
                    p.lerp_(self.state[p]["z"], 1 - b if train else 1 - 1 / b)
            group["mode"] = train

    def train(self):
        self.moved(True)

    def eval(self):
        self.moved(False)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            (b1, b2), k, warmup = group["betas"], group["k"], group["warmup"]
            lr = group["lr"] * ((k + 1) / warmup if k < warmup else 1.0)
            group["top"] = max(lr, group["top"])
            group["sum"] += group["top"] ** 2
            share = group["top"] ** 2 / group["sum"]
            for p in group["params"]:
                if p not in self.state:
                    self.state[p] |= dict(z=p.clone(), square=torch.zeros_like(p))
                z, square = self.state[p]["z"], self.state[p]["square"]
                square.mul_(b2).addcmul_(p.grad, p.grad, value=1 - b2)
                step = p.grad / ((square / (1 - b2 ** (k + 1))).sqrt() + group["eps"])
                p.lerp_(z, share).add_(step, alpha=lr * (b1 * (1 - share) - 1))
                z.sub_(step, alpha=lr)
            group["k"] = k + 1


sys.modules["schedulefree"] = types.SimpleNamespace(AdamWScheduleFree=ScheduleFree, SGDScheduleFree=None)
transformers.trainer_optimizer.is_schedulefree_available = lambda *_: True


def distance(one, two):
    return sum(float((one[name] - value).square().sum()) for name, value in two.items()) ** 0.5


def run(**more):
    """Distances: weights that are saved behind the last step from the average, those from the start, the start from the average."""
    folder, model = tempfile.mkdtemp(), tiny()
    start = {name: value.clone() for name, value in model.state_dict().items()}
    wanted = dict(learning_rate=1e-2, optim="schedule_free_adamw", lr_scheduler_type="constant") | more
    args = transformers.TrainingArguments(**options(**wanted))
    trainer = transformers.Trainer(model, args, train_dataset=ROWS)
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    trainer.save_model(folder)
    saved = safetensors.torch.load_file(f"{folder}/model.safetensors")
    trainer.optimizer.eval()
    average = {name: model.state_dict()[name] for name in saved}
    return distance(average, saved), distance(start, average)


print("| schedule_free_adamw | saved weights from the average | the average from the start |\n|---|---|---|")
off, way = run(max_steps=20)
print(f"| 20 steps | {off:.3f}, right: 0 | {way:.3f} |")
steps = {name: run(max_steps=1, warmup_steps=value)[1] for name, value in (("0", 0), ("0.1", 0.1), ("0.01", 0.01))}
for name, way in steps.items():
    print(f"| the first step, warmup_steps={name} | | {way:.3f} |")
raise SystemExit(int(off > 1e-3 or steps["0.1"] > 2 * steps["0"]))
