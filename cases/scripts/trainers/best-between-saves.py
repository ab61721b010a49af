# transformers 5.23.0: load_best_model_at_end, save_steps a multiple of eval_steps, as its help allows: the best of the saved models is not what is loaded, and none is where the best evaluation of all has no checkpoint
# transformers/trainer.py:Trainer._determine_best_metric compares with every evaluation, _save_checkpoint asks only whether there is a folder of the best of them; 4.46 compared those that are saved
import tempfile

import safetensors.torch
import torch
import transformers
from setup_tiny import options, tiny

ROWS = [dict(input_ids=torch.arange(2, 9) + i, labels=torch.arange(2, 9) + i) for i in range(4)]


def run(scores):
    """The checkpoint whose weights the model ends with."""
    folder, told = tempfile.mkdtemp(), iter(scores)
    wanted = dict(output_dir=folder, learning_rate=1e-2, max_steps=6, metric_for_best_model="score")
    wanted |= dict(eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=2)
    wanted |= dict(load_best_model_at_end=True, greater_is_better=False)
    args = transformers.TrainingArguments(**options(**wanted))
    given = dict(train_dataset=ROWS, eval_dataset=ROWS, compute_metrics=lambda _: {"score": next(told)})
    trainer = transformers.Trainer(tiny(), args, **given)
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    now = trainer.model.state_dict()
    saved = {step: safetensors.torch.load_file(f"{folder}/checkpoint-{step}/model.safetensors") for step in (2, 4, 6)}
    same = {step: all(torch.equal(now[name], value) for name, value in one.items()) for step, one in saved.items()}
    return next(step for step in same if same[step]), trainer.state.best_metric


transformers.logging.disable_progress_bar()
print("| scores of steps 1 to 6, lower is better, every second is saved | loaded | its score | best saved | said |")
print("|---|---|---|---|---|")
wrong = False
for scores in ([3, 1, 2, 4, 5, 6], [5, 3, 1, 2, 4, 6], [1, 2, 3, 4, 5, 6]):
    loaded, said = run(scores)
    best = min((2, 4, 6), key=lambda step: scores[step - 1])
    print(f"| {scores} | step {loaded} | {scores[loaded - 1]} | step {best}: {scores[best - 1]} | {said} |")
    wrong |= loaded != best
raise SystemExit(int(wrong))
