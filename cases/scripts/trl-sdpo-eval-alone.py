# TRL 1.16: SDPO's evaluation loss is NaN with num_generations_eval=1
# the standard deviation of a group of one is NaN, and so is its advantage; GRPO's is 0.
import datasets
from setup_self import saved, sdpo
from setup_tiny import tiny

data = datasets.Dataset.from_list([{"prompt": "w2 w3"}, {"prompt": "w4 w5 w6"}])
print("| num_generations_eval | evaluation loss |\n|---|---|")
bad = False
for n in (2, 1):
    trainer = sdpo(
        saved(tiny()),
        lambda completions, **_: [float(i) for i in range(len(completions))],
        distillation_weight=0.0,
        num_generations_eval=n,
        per_device_eval_batch_size=2,
    )
    loss = trainer.evaluate(data)["eval_loss"]
    bad |= loss != loss
    print(f"| {n} | {loss:.4g} |")
raise SystemExit(int(bad))
