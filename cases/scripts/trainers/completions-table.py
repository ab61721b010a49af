"""GRPO, log_completions: an evaluation writes its table over that of the training's step, rows of the training among its own; a column
of log_extra that not every batch has keeps what it had."""

import os

import datasets
import pandas
import transformers
from setup_self import saved
from setup_tiny import options, tiny, tokenizer
from trl import GRPOConfig, GRPOTrainer
from trl.trainer import grpo_trainer

grpo_trainer.print_prompt_completions_sample = lambda *_, **__: None
transformers.utils.logging.set_verbosity_error()
datasets.disable_progress_bars()
TEST, TABLES = "w30", []


def rewarded(prompts, completions, log_extra, **_):
    if prompts[0] == "w2":  # a task that has an answer to show
        log_extra("answer", [f"of {prompt}" for prompt in prompts])
    return [float(len(completion)) for completion in completions]


def run(steps, prompts, **more):
    sizes = dict(per_device_train_batch_size=2, per_device_eval_batch_size=2, num_generations=2, max_steps=steps)
    more |= dict(max_completion_length=4, log_completions=True, shuffle_dataset=False)
    args = GRPOConfig(**options(**sizes | more) | dict(logging_strategy="steps", logging_steps=1))
    train, test = (datasets.Dataset.from_list([{"prompt": p} for p in some]) for some in (prompts, [TEST]))
    trainer = GRPOTrainer(saved(tiny()), rewarded, args, train, test, tokenizer)
    trainer.remove_callback(transformers.PrinterCallback)

    def kept(frame, path, *_, **__):
        mode = "training" if trainer.model.training else "evaluation"
        answers = frame["answer"].tolist() if "answer" in frame else []
        TABLES.append((os.path.basename(path), mode, frame["prompt"].tolist(), answers))

    pandas.DataFrame.to_parquet = kept
    trainer.train()
    found = TABLES[:]
    TABLES.clear()
    return found


mixed = stale = False
print("| file | written by | prompts of the training | of the evaluation |\n|---|---|---|---|")
every = dict(eval_strategy="steps", eval_steps=1, steps_per_generation=4)
for path, mode, prompts, _ in run(2, [f"w{i}" for i in range(3, 11)], **every):
    other = prompts.count(TEST)
    mixed |= other not in ((0,) if mode == "training" else (len(prompts),))
    print(f"| {path} | {mode} | {len(prompts) - other} | {other} |")
print("\n| file | prompts | answers that log_extra logged |\n|---|---|---|")
for path, _, prompts, answers in run(3, ["w2", "w3", "w4"]):
    stale |= any(answer not in (None, f"of {prompt}") for prompt, answer in zip(prompts, answers))
    print(f"| {path} | {prompts} | {answers} |")
raise SystemExit(int(mixed or stale))
