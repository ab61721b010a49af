"""TRL's trainer for a teacher behind HTTP, whatever its release calls it, on two stored ragged completions.

ServerDistillationTrainer since 1.10; TRL 1.1 to 1.9 had its path in the experimental DistillationTrainer. The prompts and
completions go in through a dataset and come out of the trainer's own batching; where the release samples completions
itself, the stored ones are returned in place of the student's generation.
"""

from typing import Any

from parity.errors import Unsupported
from parity.trainers.rig import drive, models, recorder, stored_window, twin_runs
from parity.trainers.rig.stored_window import Sample
from parity.trainers.rig.teacher_server import Teacher

SAMPLES = {"ragged": ((2, 5), (4, 2)), "equal": ((3, 5), (3, 2))}
"""Tokens of prompt and completion, by what the prompts are; ragged ones shift the offsets within a batch."""


def upstream() -> str:
    """The class of the installed release whose teacher may be a server.

    Raises:
        Unsupported: when it has none.
    """
    for name in ("ServerDistillationTrainer", "DistillationTrainer"):
        try:
            if hasattr(drive.trl_class(name), "_get_teacher_token_logprobs_from_server"):
                return name
        except Unsupported:
            pass
    raise Unsupported("the installed version has no distillation from a teacher server")


def samples(prompts: str = "ragged") -> list[Sample]:
    """The samples as words."""
    return [
        Sample(models.words(i, "prompt", p), models.words(i, "completion", c), "", label=True)
        for i, (p, c) in enumerate(SAMPLES[prompts])
    ]


def trainer(teacher: Teacher, architecture: str, split: str, beta: float) -> Any:
    """A trainer over a tiny student; `split` is "batch x accumulation"."""
    name = upstream()
    wanted = recorder.plain(split) | {
        "num_generations": 1,
        "teacher_model_server_url": teacher.url,
        "use_teacher_server": True,
        "lmbda": 0.0,
        "max_length": 32,
        "temperature": 1.0,
        "loss_top_k": 1,
        "beta": beta,
    }
    generates = hasattr(drive.trl_class(name), "_generate_single_turn")
    data = stored_window.dataset(samples(), "prompts" if generates else "turns")
    made = drive.build(name, models.model(architecture), wanted, train_dataset=data)
    stored = {tuple(stored_window.ids(s.prompt)): stored_window.ids(s.completion) for s in samples()}
    if generates:
        made._generate_single_turn = lambda prompt_ids, *_: [list(stored[tuple(p)]) for p in prompt_ids]
    elif not hasattr(made.args, "lmbda"):  # 1.9, which always samples
        twin_runs.generate_in_model(made, {prompt: [completion] for prompt, completion in stored.items()})
    return made
