# transformers 5.23.0: lr_scheduler_type "reduce_lr_on_plateau" or "greedy" with a metric of which more is better: the rate falls while it rises; "greedy" lowers no rate below 0.001, its default min_lr
# transformers/optimization.py:get_scheduler hands on lr_scheduler_kwargs alone: `mode` stays "min" where greater_is_better is True; GreedyLR._reduce_lr takes max(rate * factor, min_lr)
import itertools

import torch
import transformers
from setup_tiny import options, tiny

ROWS = [dict(input_ids=torch.arange(2, 9) + i, labels=torch.arange(2, 9) + i) for i in range(4)]


def run(kind, scores, rate, greater, **more):
    """The learning rate behind the last of the evaluations, times that of the first."""
    told = itertools.chain(scores, itertools.repeat(scores[-1]))
    wanted = dict(learning_rate=rate, max_steps=len(scores), lr_scheduler_type=kind, lr_scheduler_kwargs=more)
    wanted |= dict(eval_strategy="steps", eval_steps=1, metric_for_best_model="score", greater_is_better=greater)
    args = transformers.TrainingArguments(**options(**wanted))
    given = dict(train_dataset=ROWS, eval_dataset=ROWS, compute_metrics=lambda _: {"score": next(told)})
    trainer = transformers.Trainer(tiny(), args, **given)
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    return trainer.optimizer.param_groups[0]["lr"] / rate


better, worse = [i / 10 for i in range(1, 9)], [1.0 - i / 10 for i in range(8)]
transformers.logging.disable_progress_bar()
print("| scheduler, metric | its rate, times the first | right |\n|---|---|---|")
wrong = []
for kind, rate in (("reduce_lr_on_plateau", 5e-5), ("greedy", 5e-3)):
    for scores, says in ((better, "rises"), (worse, "falls")):
        found = run(kind, scores, rate, True, patience=1)
        down = says == "falls"
        print(f"| {kind}, greater_is_better, the metric {says} | {found:.3g} | {'below 1' if down else '1 or above'} |")
        wrong.append((found < 1) != down)
for rate in (5e-3, 5e-4, 5e-5):
    found = run("greedy", [1.0 + i for i in range(40)], rate, False)
    print(f"| greedy, its defaults, rate {rate}, 40 evaluations, a loss that rises | {found:.3g} | below 1 |")
    wrong.append(found >= 1)
raise SystemExit(int(any(wrong)))
