"""TRL's trainer for a teacher behind HTTP, whatever its release calls it, on two stored ragged completions.

ServerDistillationTrainer since 1.10; TRL 1.1 to 1.9 had its path in the experimental DistillationTrainer. The prompts and
completions go in through a dataset and come out of the trainer's own batching; where the release samples completions
itself, the stored ones are returned in place of the student's generation.
"""

from typing import Any

import torch
from torch import Tensor

from parity.errors import Unsupported
from parity.trainers.definitions import training_step
from parity.trainers.rig import drive, models, recorder, stored_window, twin_runs
from parity.trainers.rig.teacher_server import Teacher
from parity.upstream import trl

SAMPLES = {"ragged": ((2, 5), (4, 2)), "equal": ((3, 5), (3, 2))}
"""Tokens of prompt and completion, by what the prompts are; ragged ones shift the offsets within a batch."""

IGNORED = -100


def classes() -> tuple[type, type]:
    """Trainer and config of the installed release, or the user's own in their place.

    Raises:
        Unsupported: when it has no teacher-server path.
    """
    try:
        from trl.experimental.server_distillation import ServerDistillationConfig, ServerDistillationTrainer

        return _in_use(ServerDistillationTrainer, ServerDistillationConfig)
    except ImportError:
        pass
    try:
        from trl.experimental.distillation import DistillationConfig, DistillationTrainer
    except ImportError:
        raise Unsupported("the installed version has no distillation from a teacher server") from None
    if not hasattr(DistillationTrainer, "_get_teacher_token_logprobs_from_server"):
        raise Unsupported("the installed version has no distillation from a teacher server")
    return _in_use(DistillationTrainer, DistillationConfig)


def _in_use(trainer: type, config: type) -> tuple[type, type]:
    chosen = drive.in_use(trainer)
    return chosen, trl.config_class(chosen, config)


def rows(prompts: str = "ragged") -> list[dict[str, str]]:
    """The samples as words: prompt and completion."""
    return [
        {"prompt": models.words(i, "prompt", p), "completion": models.words(i, "completion", c)}
        for i, (p, c) in enumerate(SAMPLES[prompts])
    ]


def dataset(messages: bool, prompts: str = "ragged") -> Any:
    """The samples as a dataset: conversations whose last turn is the completion, or prompts alone."""
    from datasets import Dataset

    if not messages:
        return Dataset.from_list([{"prompt": row["prompt"]} for row in rows()])
    roles = (("user", "prompt"), ("assistant", "completion"))
    turns = [[{"role": r, "content": row[k]} for r, k in roles] for row in rows(prompts)]
    return Dataset.from_list([{"messages": t} for t in turns])


def trainer(teacher: Teacher, architecture: str, split: str, **settings: Any) -> Any:
    """A trainer over a tiny student; `split` is "batch x accumulation", `settings` go to its config."""
    kind, config = classes()
    batch, accumulation = map(int, split.split("x"))
    wanted = recorder.PLAIN | {
        "per_device_train_batch_size": batch,
        "gradient_accumulation_steps": accumulation,
        "max_completion_length": 8,
        "teacher_model_server_url": teacher.url,
        "use_teacher_server": True,
        "lmbda": 0.0,
        "max_length": 32,
        **settings,
    }
    samples = hasattr(kind, "_generate_single_turn")
    with trl.quiet(), trl.environment_kept():
        made = kind(
            model=models.model(architecture),
            args=trl.configured(config, "cpu", wanted),
            train_dataset=dataset(messages=not samples),
            processing_class=models.tokenizer(),
        )
    stored = {tuple(stored_window.ids(row["prompt"])): stored_window.ids(row["completion"]) for row in rows()}
    if samples:
        made._generate_single_turn = lambda prompt_ids, *_: [list(stored[tuple(p)]) for p in prompt_ids]
    elif not hasattr(made.args, "lmbda"):  # 1.9, which always samples
        twin_runs.generate_in_model(made, {prompt: [completion] for prompt, completion in stored.items()})
    return made


Sample = tuple[list[int], int]
"""Token ids of prompt and completion without padding, and the length of the prompt."""


def layout(batch: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """ids, attention mask and labels of a recorded batch, each (B, T), in either spelling."""
    if "labels" in batch:
        return batch["input_ids"], batch["attention_mask"], batch["labels"]
    tokens = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    completion = torch.where(batch["completion_mask"].bool(), batch["completion_ids"], IGNORED)
    return tokens, mask, torch.cat([torch.full_like(batch["prompt_ids"], IGNORED), completion], 1)


def samples(batch: dict[str, Any]) -> list[Sample]:
    """The sequences of a recorded batch without their padding."""
    out = []
    for row, mask, label in zip(*layout(batch), strict=True):
        kept = row[mask.bool()].tolist()
        out.append((kept, len(kept) - int((label != IGNORED).sum())))
    return out


def student_logps(model: Any, batch: list[Sample], temperature: float) -> list[Tensor]:
    """Log-probs (T_i, V) at the positions that predict a completion token."""
    return [torch.log_softmax(z / temperature, -1) for z, _ in training_step.completion_logits(model, batch)]
