"""One optimizer window of stored data, and the models that go with it, for every trainer whose twins are compared.

Eight sequences of unequal lengths (of pairs: chosen and rejected of each). The policy is the tiny model moved a little, so
that a reference model, read from disk, is not equal to it and log-ratios are not zero.
"""

import dataclasses
import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from parity.case.case import hashes, normal
from parity.trainers.rig import models
from parity.upstream import trl

PROMPT_LENGTHS = (2, 6, 3, 5, 2, 4, 7, 3)
LENGTHS = (7, 1, 4, 8, 2, 6, 3, 5)
"""Tokens of each completion: no two alike, so that a mean of means is not the mean."""
OTHER_LENGTHS = (3, 6, 2, 2, 8, 1, 5, 4)
NUDGE, MOVED, OLDER = 0.05, 5, 6
"""By how much the policy's parameters are moved, its seed, and that of one that takes the place of an older policy."""
ADAPTED, HANDED_OVER, ADAPTER_SIZE = "+adapter", 3, 0.1
"""Suffix of an architecture with the adapter that a trainer is handed, seed of that adapter, size of its weights."""
GENERATIONS = 2
Sequences = list[tuple[list[int], int]]
"""Token ids of prompt and completion, and the length of the prompt."""


@dataclasses.dataclass(frozen=True)
class Sample:
    """A sample as words: a prompt, a completion, and another completion of the same prompt.

    `counted`: in the loss; `ended`: with `end`, where a model generates the completion (a dataset's always end so);
    `limit`: tokens after which generation is cut off.
    """

    prompt: str
    completion: str
    other: str
    label: bool
    counted: bool = True
    ended: bool = True
    end: int = models.EOS
    limit: int | None = None


def rows(prompts: int = 8) -> list[Sample]:
    """The samples of the window; with fewer prompts than samples they follow each other in groups of one prompt."""
    out = []
    for i, (length, other) in enumerate(zip(LENGTHS, OTHER_LENGTHS, strict=True)):
        group = i * prompts // len(LENGTHS)
        prompt = models.words(11, f"prompt {group}", PROMPT_LENGTHS[group]) + " "
        completion, alternative = models.words(11, f"completion {i}", length), models.words(11, f"other {i}", other)
        out.append(Sample(prompt, completion, alternative, label=i % 3 != 0, ended=i % 2 == 0))
    return out


def brief() -> list[Sample]:
    """Eight prompts of unequal lengths, each with two completions: what a trainer is given that brings no window of its own."""
    return [
        Sample(
            models.words(7, f"prompt {i}", 2 + 3 * (i % 3)) + " ",
            models.words(7, f"chosen {i}", 3 + i % 4),
            models.words(7, f"rejected {i}", 5 - i % 3),
            label=True,
        )
        for i in range(8)
    ]


def dataset(chosen: Sequence[Sample], columns: str) -> Any:
    """The samples as a dataset of "prompts", or with "completions", with "labels" besides, or with "pairs".

    "messages" are conversations of a prompt alone, "turns" such that end with the completion.
    """
    from datasets import Dataset

    prompts, completions = [r.prompt for r in chosen], [r.completion for r in chosen]
    asked = [{"role": "user", "content": p} for p in prompts]
    answers = [{"role": "assistant", "content": c} for c in completions]
    table: dict[str, dict[str, list[Any]]] = {
        "prompts": {"prompt": prompts},
        "completions": {"prompt": prompts, "completion": completions},
        "labels": {"prompt": prompts, "completion": completions, "label": [r.label for r in chosen]},
        "pairs": {"prompt": prompts, "chosen": completions, "rejected": [r.other for r in chosen]},
        "messages": {"messages": [[a] for a in asked]},
        "turns": {"messages": [[a, b] for a, b in zip(asked, answers, strict=True)]},
    }
    return Dataset.from_dict(table[columns])


def reward(completions: Any, **kwargs: Any) -> list[float]:
    """A reward that differs within a group: a hash of the completion, in [0, 1)."""
    return [float(hashes(3, str(c), (1,))[0] >> 40) / 2**24 for c in completions]


def without(chosen: Sequence[Sample], bare: Collection[int]) -> list[Sample]:
    """The rows; where some of them, by number, are not to be counted, they are the ones without an end: truncated."""
    if not bare:
        return list(chosen)
    return [dataclasses.replace(r, counted=i not in bare, ended=i not in bare) for i, r in enumerate(chosen)]


def ids(text: str) -> list[int]:
    """Token ids of words."""
    found: list[int] = models.tokenizer()(text, add_special_tokens=False)["input_ids"]
    return found


def sequences(chosen: Sequence[Sample], name: str = "completion", generated: bool = False) -> Sequences:
    """Prompt and completion of each row as token ids; `generated`: by a model, which ends some of them.

    Of a row that is not counted every token stands before the completion: none is scored.
    """
    out = []
    for row in chosen:
        prompt, completion = (
            ids(row.prompt),
            (ids(getattr(row, name)) + ([row.end] if row.ended or not generated else []))[: row.limit],
        )
        out.append((prompt + completion, len(prompt) + (0 if row.counted else len(completion))))
    return out


def policy(architecture: str, dtype: torch.dtype = torch.float32, seed: int = MOVED) -> Any:
    """The model of the twins: the saved one, each parameter moved by a share of itself, the same bits in every dtype."""
    out = models.model(architecture, dtype).train()
    with torch.no_grad():
        for name, parameter in out.named_parameters():
            share = 1 + NUDGE * normal(seed, name, parameter.shape)
            parameter.copy_((parameter.float() * share.float()).to(parameter.dtype))
    return out


def policy_at(architecture: str, parameters: Mapping[str, Tensor]) -> Any:
    """The policy in float64 with the parameters that a run had at one of its steps."""
    out = policy(architecture, torch.float64)
    out.load_state_dict(parameters)
    return out


Reference: TypeAlias = str | torch.nn.Module
"""The name of a saved model, "llama+adapter" with the adapter that a trainer is handed; or a model in float64 itself."""


def reference(of: Reference) -> Any:
    """A reference model in float64, without gradients."""
    return of if isinstance(of, torch.nn.Module) else saved_reference(of)


@functools.cache
def saved_reference(architecture: str) -> Any:
    """The saved model in float64, without gradients; of "llama+adapter" with the adapter that a trainer is handed."""
    name = architecture.removesuffix(ADAPTED)
    out = models.model(name, torch.float64)
    if name != architecture:
        out = adapted(out, HANDED_OVER)
    return out.eval().requires_grad_(False)


def adapted(base: Any, seed: int, **options: Any) -> Any:
    """`base` with a LoRA whose weights are drawn from `seed`, in the dtype of the base."""
    import peft

    with trl.quiet():
        out = peft.get_peft_model(base, trl.lora(**options), autocast_adapter_dtype=False)
    fill_adapter(out, seed)
    return out


def fill_adapter(model: Any, seed: int) -> None:
    """Weights of the adapter that is trained, by parameter name, none of them zero; a saved copy away from its original."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".ref." in name:
                continue
            if "lora_" in name:
                parameter.copy_(ADAPTER_SIZE * normal(seed, name, parameter.shape).to(parameter))
            elif "modules_to_save" in name:
                share = 1 + NUDGE * normal(seed, name, parameter.shape)
                parameter.copy_((parameter.float() * share.float()).to(parameter))


def rewards(window: Sequences) -> Tensor:
    """The rewards of the stored completions, in groups: (prompts, generations), float64."""
    texts = models.tokenizer().batch_decode([t[start:] for t, start in window], skip_special_tokens=True)
    return torch.tensor(reward(completions=texts), dtype=torch.float64).view(-1, GENERATIONS)


def preferred(chosen: Sequence[Sample], penalty: float = 0.0) -> tuple[Sequences, Sequences]:
    """Of each row the completion with the higher reward, and the other one: what online DPO calls chosen and rejected.

    `penalty`: what a completion without an end loses.
    """
    first, second = (sequences(chosen, name) for name in ("completion", "other"))
    texts = [[" ".join(getattr(r, name).split()[: r.limit]) for r in chosen] for name in ("completion", "other")]
    scores = [
        [x - penalty * (t[-1] != models.EOS) for x, (t, _) in zip(reward(completions=text), side, strict=True)]
        for text, side in zip(texts, (first, second), strict=True)
    ]
    keep = [a >= b for a, b in zip(*scores, strict=True)]
    better = [a if k else b for a, b, k in zip(first, second, keep, strict=True)]
    worse = [b if k else a for a, b, k in zip(first, second, keep, strict=True)]
    return better, worse
