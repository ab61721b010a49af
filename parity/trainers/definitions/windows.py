"""One optimizer window of stored data, and its loss by definition, for every trainer whose twins are compared.

Eight sequences of unequal lengths (of pairs: chosen and rejected of each). The policy is the tiny model moved a little, so
that a reference model, read from disk, is not equal to it and log-ratios are not zero. Definitions are those of the
papers; each is a mean over the window, however a trainer cuts it into micro-batches.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from parity.case.case import Case, normal
from parity.case.inputs import Inputs, defaults
from parity.families.divergence import divergence
from parity.families.policy import FAMILY as POLICY
from parity.rounding.monte_carlo import exact_mark
from parity.trainers.definitions import training_step
from parity.trainers.rig import models
from parity.trainers.rig.drive import reward
from parity.upstream import trl

PROMPT_LENGTHS = (2, 6, 3, 5, 2, 4, 7, 3)
LENGTHS = (7, 1, 4, 8, 2, 6, 3, 5)
"""Tokens of each completion: no two alike, so that a mean of means is not the mean."""
OTHER_LENGTHS = (3, 6, 2, 2, 8, 1, 5, 4)
NUDGE = 0.05
ADAPTED, HANDED_OVER, ADAPTER_SIZE = "+adapter", 3, 0.1
"""Suffix of an architecture with the adapter that a trainer is handed, seed of that adapter, size of its weights."""
GENERATIONS = 2
CLIP = 0.2
"""ε of the clipped ratio, TRL's default in GRPO and RLOO."""

Sequences = list[tuple[list[int], int]]
"""Token ids of prompt and completion, and the length of the prompt."""


@dataclasses.dataclass(frozen=True)
class Row:
    """A sample as words: a prompt, a completion, and another completion of the same prompt; `counted`: in the loss."""

    prompt: str
    completion: str
    other: str
    label: bool
    counted: bool = True


def rows(prompts: int = 8) -> list[Row]:
    """The samples; with fewer prompts than samples they follow each other in groups of one prompt."""
    out = []
    for i, (length, other) in enumerate(zip(LENGTHS, OTHER_LENGTHS, strict=True)):
        group = i * prompts // len(LENGTHS)
        prompt = models.words(11, f"prompt {group}", PROMPT_LENGTHS[group]) + " "
        completion, alternative = models.words(11, f"completion {i}", length), models.words(11, f"other {i}", other)
        out.append(Row(prompt, completion, alternative, label=i % 3 != 0))
    return out


def ids(text: str) -> list[int]:
    """Token ids of words."""
    found: list[int] = models.tokenizer()(text, add_special_tokens=False)["input_ids"]
    return found


def sequences(chosen: Sequence[Row], name: str = "completion", eos: bool = True) -> Sequences:
    """Prompt and completion of each row as token ids; `eos`: the completion ends as a dataset's does.

    Of a row that is not counted every token stands before the completion: none is scored.
    """
    out = []
    for row in chosen:
        prompt, completion = ids(row.prompt), ids(getattr(row, name)) + ([models.EOS] if eos else [])
        out.append((prompt + completion, len(prompt) + (0 if row.counted else len(completion))))
    return out


def policy(architecture: str, dtype: torch.dtype = torch.float32) -> Any:
    """The model of the twins: the saved one, each parameter moved by a share of itself, the same bits in every dtype."""
    out = models.model(architecture, dtype).train()
    with torch.no_grad():
        for name, parameter in out.named_parameters():
            share = 1 + NUDGE * normal(5, name, parameter.shape)
            parameter.copy_((parameter.float() * share.float()).to(parameter.dtype))
    return out


@functools.cache
def reference(architecture: str) -> Any:
    """The saved model in float64, without gradients; of "llama+adapter" with the adapter that a trainer is handed."""
    name = architecture.removesuffix(ADAPTED)
    out = models.model(name, torch.float64)
    if name != architecture:
        out = adapted(out, HANDED_OVER)
    return out.eval().requires_grad_(False)


@contextlib.contextmanager
def _standing(name: str, function: Callable[[Any], Any]) -> Iterator[None]:
    """Within it the function `name` of this module is another one."""
    saved, globals()[name] = globals()[name], function
    try:
        yield
    finally:
        globals()[name] = saved


def referring(model: Any) -> contextlib.AbstractContextManager[None]:
    """Within it every definition takes `model`, in float64 and without gradients, for its reference."""
    return _standing("reference", lambda architecture: model)


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


def completion_logps(model: Any, window: Sequences, temperature: float = 1.0) -> list[Tensor]:
    """Log-probs (T_i,) of the tokens of each completion."""
    out = []
    for z, (tokens, start) in zip(training_step.logits(model, [t for t, _ in window]), window, strict=True):
        actual = torch.tensor(tokens[start:]).unsqueeze(-1)
        out.append(torch.log_softmax(z[start - 1 : -1] / temperature, -1).gather(-1, actual)[:, 0])
    return out


def sums(model: Any, window: Sequences) -> Tensor:
    """log π(completion) of each sequence, (N,)."""
    return torch.stack([lp.sum() for lp in completion_logps(model, window)])


def log_ratios(model: Any, architecture: str, window: Sequences) -> Tensor:
    """log π - log π_ref of each completion, (N,)."""
    with torch.no_grad():
        base = sums(reference(architecture), window)
    return sums(model, window) - base


def sft(window: Sequences, model: Any) -> Tensor:
    """-Σ log p / N over the N completion tokens of the window."""
    logps = torch.cat(completion_logps(model, window))
    return -logps.sum() / logps.numel()


def dpo(window: tuple[Sequences, Sequences], architecture: str, beta: float, model: Any) -> Tensor:
    """mean of -log σ(β(Δ_chosen - Δ_rejected)), Δ the log-ratio to the reference (arXiv 2305.18290)."""
    chosen, rejected = (log_ratios(model, architecture, w) for w in window)
    return -logsigmoid(beta * (chosen - rejected)).mean()


def kto(window: Sequences, labels: Sequence[bool], architecture: str, beta: float, model: Any) -> Tensor:
    """mean of 1 - σ(βΔ) of a desirable and σ(βΔ) of an undesirable completion (APO-zero, arXiv 2408.06266, unpaired).

    KTO's own loss subtracts a KL estimated on the micro-batch, so that it is not a sum over micro-batches.
    """
    p = torch.sigmoid(beta * log_ratios(model, architecture, window))
    return torch.where(torch.tensor(labels), 1 - p, p).mean()


def rewards(window: Sequences) -> Tensor:
    """The rewards of the stored completions, in groups: (prompts, generations), float64."""
    texts = models.tokenizer().batch_decode([t[start:] for t, start in window], skip_special_tokens=True)
    return torch.tensor(reward(completions=texts), dtype=torch.float64).view(-1, GENERATIONS)


def earning(window: Sequences) -> contextlib.AbstractContextManager[None]:
    """Within it every definition takes the rewards of these sequences, whatever is left of them in a loss."""
    earned = rewards(window)
    return _standing("rewards", lambda window: earned)


def preferred(chosen: Sequence[Row]) -> tuple[Sequences, Sequences]:
    """Of each row the completion with the higher reward, and the other one: what online DPO calls chosen and rejected."""
    first, second = (sequences(chosen, name) for name in ("completion", "other"))
    scores = [reward(completions=[r.completion for r in chosen]), reward(completions=[r.other for r in chosen])]
    keep = [a >= b for a, b in zip(*scores, strict=True)]
    better = [a if k else b for a, b, k in zip(first, second, keep, strict=True)]
    worse = [b if k else a for a, b, k in zip(first, second, keep, strict=True)]
    return better, worse


@dataclasses.dataclass(frozen=True)
class Generation:
    """What a window is a part of: all sequences generated together, by which policy, for how many optimizer steps."""

    whole: Sequences
    old: Any
    steps: int

    def of(self, window: Sequences, values: Tensor) -> Tensor:
        """The values of the window's sequences out of those of the whole generation."""
        return values[[self.whole.index(sequence) for sequence in window]]


def rloo(window: Sequences, architecture: str, beta: float, generation: Generation | None, model: Any) -> Tensor:
    """-mean of min(ρA, clip(ρ)A), ρ = π/π_old, A the reward minus the mean of the group's others (arXiv 2402.14740).

    The reward is less β(log π_old - log π_ref) of the whole completion.
    """
    whole = window if generation is None else generation.whole
    logps = sums(model, window)
    old = logps.detach()
    r = rewards(whole)
    with torch.no_grad():
        if generation is not None:
            old = sums(generation.old, window)
        if beta != 0.0:
            then = old if generation is None else sums(generation.old, whole)
            r = r - beta * (then - sums(reference(architecture), whole)).view(r.shape)
    advantages = (r - (r.sum(1, keepdim=True) - r) / (GENERATIONS - 1)).flatten()
    if generation is not None:
        advantages = generation.of(window, advantages)
    ratio = (logps - old).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages).mean()


def advantages(window: Sequences) -> Tensor:
    """GRPO's: the reward less its group's mean, over the group's standard deviation + 1e-4, (N,)."""
    r = rewards(window)
    return ((r - r.mean(1, keepdim=True)) / (r.std(1, keepdim=True) + 1e-4)).flatten()


def grpo(
    window: Sequences,
    architecture: str,
    settings: dict[str, Any],
    own: Callable[[Tensor], Tensor] | None,
    generation: Generation | None,
    model: Any,
    ratio: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> Tensor:
    """Family `policy` on the model's hidden states and head, the window as one batch; `own`: token ids -> tool mask.

    `ratio`: log-probs (N, T) and mask -> the sampler's importance ratio.
    """
    fam = POLICY
    s = SimpleNamespace(**{**defaults(fam.settings), **head_settings(model), **settings})
    tensors = policy_tensors(window, model)
    if s.beta != 0.0:
        with torch.no_grad():
            tensors["ref_logps"] = padded(completion_logps(reference(architecture), window))
    if generation is not None:
        s.steps_per_generation = generation.steps
        tensors["advantages"] = generation.of(window, advantages(generation.whole))
        tensors["num_items_in_batch"] = torch.tensor(float(sum(len(t) - n for t, n in generation.whole)))
        with torch.no_grad():
            tensors["old_logps"] = padded(completion_logps(generation.old, window))
    if own is not None:
        mask, tokens = tensors["mask"], tensors["ids"]
        assert mask is not None and tokens is not None
        mask = torch.where(own(tokens) != 0, mask, torch.zeros_like(mask))  # a replica rounds a product's 0 too
        tensors |= {"mask": mask, "num_items_in_batch": mask.sum()}
    if ratio is not None:
        assert tensors["mask"] is not None
        with torch.no_grad():
            found = padded(completion_logps(model, window))
            tensors["importance_sampling_ratio"] = ratio(found, tensors["mask"])
    inputs = Inputs(Case("policy", 0, "fp64"), s, tensors, (), {})
    return fam.oracle(inputs, exact_mark)["loss"]


def head_settings(model: Any) -> dict[str, Any]:
    """What lies between the head's product and the logits, as settings of a loss family."""
    config = model.config.get_text_config()
    return {
        "softcap": getattr(config, "final_logit_softcapping", None),
        "logit_scale": getattr(config, "logit_scale", None) or 1.0,
    }


def policy_tensors(window: Sequences, model: Any) -> dict[str, Tensor | None]:
    """A window as the inputs of family `policy`: hidden states and head of the model, advantages of the stored rewards."""
    width = max(len(t) for t, _ in window)
    tokens = torch.tensor([t + [models.PAD] * (width - len(t)) for t, _ in window])
    attention = torch.tensor([[1] * len(t) + [0] * (width - len(t)) for t, _ in window])
    backbone = (model.get_base_model() if hasattr(model, "get_base_model") else model).base_model
    hidden = backbone(input_ids=tokens, attention_mask=attention, use_cache=False).last_hidden_state
    pieces = [hidden[i, start - 1 : len(t) - 1] for i, (t, start) in enumerate(window)]
    counts = [len(t) - start for t, start in window]
    mask = padded([torch.ones(n, dtype=torch.float64) for n in counts])
    head = model.get_output_embeddings()
    none = (
        "old_logps",
        "ref_logps",
        "sampling_logps",
        "importance_sampling_ratio",
        "top_entropy_quantile",
        "tool_mask",
    )
    return {
        "hidden": torch.nn.utils.rnn.pad_sequence(pieces, batch_first=True),
        "weight": head.weight,
        "bias": head.bias,
        "ids": torch.nn.utils.rnn.pad_sequence([torch.tensor(t[start:]) for t, start in window], batch_first=True),
        "mask": mask,
        "completion_mask": mask,
        "advantages": advantages(window),
        "num_items_in_batch": mask.sum(),
        **dict.fromkeys(none),
        "lora_a": None,
        "lora_b": None,
    }


def padded(pieces: list[Tensor]) -> Tensor:
    """Rows of unequal lengths as one tensor, zeros on the right."""
    return torch.nn.utils.rnn.pad_sequence(pieces, batch_first=True)


def distillation(window: Sequences, teacher: Any, beta: float, model: Any) -> Tensor:
    """Mean over the completion tokens of the window of the generalised JSD to the teacher."""
    tokens = [t for t, _ in window]
    with torch.no_grad():
        q = training_step.logits(teacher, tokens)
    terms = []
    for z, w, (_, start) in zip(training_step.logits(model, tokens), q, window, strict=True):
        lp, lq = (torch.log_softmax(x[start - 1 : -1], -1) for x in (z, w))
        gone = torch.zeros_like(lp, dtype=torch.bool)
        terms.append(divergence(lp, lq, gone, gone, beta).sum(-1))
    return torch.cat(terms).mean()
