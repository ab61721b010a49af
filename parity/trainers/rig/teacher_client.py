"""TRL's trainer for a teacher on a vLLM server, whatever its release calls it, on two stored ragged completions.

ServerDistillationTrainer since 1.10; TRL 1.1 to 1.9 had its path in the experimental DistillationTrainer. The prompts and
completions go in through a dataset and come out of the trainer's own batching; where the release samples completions
itself, the stored ones are returned in place of the student's generation. TRL's client of the server is a model here.
"""

from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from parity.errors import Unsupported
from parity.trainers.rig import drive, models, recorder, stored_window, twin_runs
from parity.trainers.rig.stored_window import Sample

SAMPLES = {"ragged": ((2, 5), (4, 2)), "equal": ((3, 5), (3, 2))}
"""Tokens of prompt and completion, by what the prompts are; ragged ones shift the offsets within a batch."""


class Teacher:
    """A model in place of TRL's `VLLMClient`; `answers`: the log-probs (T, V) of the completion of each scored sequence."""

    def __init__(self, model: Any):
        self.model = model
        self.answers: dict[tuple[int, ...], Tensor] = {}

    def get_sequence_logprobs(
        self, sequences: Sequence[list[int]], prompt_lengths: Sequence[int], top_logprobs: int, temperature: float
    ) -> dict[str, list[Any]]:
        """Of each completion token: the likeliest `top_logprobs` tokens of the vocabulary, and the token that is there."""
        out: dict[str, list[Any]] = {}
        for ids, start in zip(sequences, prompt_lengths, strict=True):
            with torch.no_grad():
                logits = self.model(input_ids=torch.tensor([ids])).logits[0, start - 1 : -1]
            logps = self.answers[tuple(ids)] = torch.log_softmax(logits.double() / temperature, -1).float()
            top, there = logps.topk(top_logprobs, -1), torch.tensor(ids[start:]).unsqueeze(-1)
            found = {
                "logprobs": top.values,
                "logprob_token_ids": top.indices,
                "actual_logprobs": logps.gather(-1, there),
                "actual_token_ids": there,
            }
            for name, value in found.items():
                out.setdefault(name, []).append(value.tolist())
        return out


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
        "teacher_model_server_url": "http://127.0.0.1",
        "use_teacher_server": True,
        "lmbda": 0.0,
        "max_length": 32,
        "temperature": 1.0,
        "loss_top_k": 1,
        "beta": beta,
    }
    generates = hasattr(drive.trl_class(name), "_generate_single_turn")
    data = stored_window.dataset(samples(), "prompts" if generates else "turns")
    from trl.generation import vllm_client

    with mock.patch.object(vllm_client, "VLLMClient", return_value=teacher):
        made = drive.build(name, models.model(architecture), wanted, train_dataset=data)
    stored = {tuple(stored_window.ids(s.prompt)): stored_window.ids(s.completion) for s in samples()}
    if generates:
        made._generate_single_turn = lambda prompt_ids, *_: [list(stored[tuple(p)]) for p in prompt_ids]
    elif not hasattr(made.args, "lmbda"):  # 1.9, which always samples
        twin_runs.generate_in_model(made, {prompt: [completion] for prompt, completion in stored.items()})
    return made
