"""The losses of a stored window by their definitions, for every trainer whose twins are compared.

Those of the papers; each is a mean over the window, however a trainer cuts it into micro-batches.
"""

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, pad

from parity.case.case import Case
from parity.case.inputs import Inputs, defaults
from parity.families.divergence import divergence
from parity.families.policy import FAMILY as POLICY
from parity.families.policy import divergence as k3
from parity.trainers.definitions import training_step
from parity.trainers.definitions.training_step import completion_logits, completion_logps
from parity.trainers.rig import stored_window
from parity.trainers.rig.stored_window import Reference, Sequences

CLIP = 0.2
"""ε of the clipped ratio, TRL's default in GRPO and RLOO."""


def sums(model: Any, window: Sequences) -> Tensor:
    """log π(completion) of each sequence, (N,)."""
    return torch.stack([lp.sum() for lp in completion_logps(model, window)])


def log_ratios(model: Any, reference: Reference, window: Sequences) -> Tensor:
    """log π - log π_ref of each completion, (N,)."""
    with torch.no_grad():
        base = sums(stored_window.reference(reference), window)
    return sums(model, window) - base


def sft(window: Sequences, model: Any) -> Tensor:
    """-Σ log p / N over the N completion tokens of the window."""
    logps = torch.cat(completion_logps(model, window))
    return -logps.sum() / logps.numel()


def dpo(window: tuple[Sequences, Sequences], reference: Reference, beta: float, model: Any) -> Tensor:
    """mean of -log σ(β(Δ_chosen - Δ_rejected)), Δ the log-ratio to the reference (arXiv 2305.18290)."""
    chosen, rejected = (log_ratios(model, reference, w) for w in window)
    return -logsigmoid(beta * (chosen - rejected)).mean()


@dataclasses.dataclass(frozen=True)
class Generation:
    """What a window is a part of: all sequences generated together, by which policy, for how many optimizer steps."""

    whole: Sequences
    old: Any
    steps: int

    def of(self, window: Sequences, values: Tensor) -> Tensor:
        """The values of the window's sequences out of those of the whole generation."""
        return values[[self.whole.index(sequence) for sequence in window]]


def rloo(
    window: Sequences,
    reference: Reference,
    beta: float,
    generation: Generation | None,
    model: Any,
    earned: Tensor | None = None,
    clip: tuple[float, float] = (CLIP, CLIP),
) -> Tensor:
    """-mean of min(ρA, clip(ρ)A), ρ = π/π_old, A the reward minus the mean of the group's others (arXiv 2402.14740).

    The reward is less β(log π_old - log π_ref) of the whole completion; `earned`: rewards other than the window's.
    """
    whole = window if generation is None else generation.whole
    logps = sums(model, window)
    old = logps.detach()
    r = stored_window.rewards(whole) if earned is None else earned
    with torch.no_grad():
        if generation is not None:
            old = sums(generation.old, window)
        if beta != 0.0:
            then = old if generation is None else sums(generation.old, whole)
            r = r - beta * (then - sums(stored_window.reference(reference), whole)).view(r.shape)
    advantages = (r - (r.sum(1, keepdim=True) - r) / (stored_window.GENERATIONS - 1)).flatten()
    if generation is not None:
        advantages = generation.of(window, advantages)
    ratio = (logps - old).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - clip[0], 1 + clip[1]) * advantages).mean()


def gmpo(
    window: Sequences,
    reference: Reference,
    beta: float,
    tools: Callable[[Tensor], Tensor] | None,
    generation: Generation | None,
    model: Any,
    clip: tuple[float, float] = (0.4, 0.4),
) -> Tensor:
    """-mean of A·exp(mean over the tokens of d), d = log π/π_old, at most ε_high for A > 0, at least -ε for the others.

    arXiv 2507.20673, equation 4; plus β times GRPO's KL, its mean over each completion. One all of whose tokens are a
    tool's has ratio 1.
    """
    whole = window if generation is None else generation.whole
    a = advantages(whole) if generation is None else generation.of(window, advantages(whole))
    tokens = completion_logps(model, window)
    with torch.no_grad():
        old = [t.detach() for t in tokens] if generation is None else completion_logps(generation.old, window)
        base = completion_logps(stored_window.reference(reference), window) if beta else old
    terms = []
    for t, o, ref, sign, (ids, start) in zip(tokens, old, base, a.tolist(), window, strict=True):
        kept = torch.ones_like(t) if tools is None else tools(torch.tensor(ids[start:])).to(t)
        count = kept.sum().clamp(min=1.0)
        d = (t - o).clamp(max=clip[1]) if sign > 0 else (t - o).clamp(min=-clip[0])
        kl = k3(ref - t, None)
        terms.append(-sign * ((d * kept).sum() / count).exp() + beta * (kl * kept).sum() / count)
    return torch.stack(terms).mean()


def beyond(
    trainer: str, window: Sequences, generation: Generation, clip: tuple[float, float], model: Any
) -> dict[str, Tensor]:
    """Shares of the tokens (RLOO: sequences) with ρ < 1 - ε and A < 0, and with ρ > 1 + ε_high and A > 0, as they are logged.

    Means over the window, the least and the largest of a sequence. GMPO's bounds are those of log ρ.
    """
    a = generation.of(window, advantages(generation.whole))
    with torch.no_grad():
        new, old = (completion_logps(m, window) for m in (model, generation.old))
    d = [n - o for n, o in zip(new, old, strict=True)]
    d = [x.sum(0, keepdim=True) for x in d] if trainer == "rloo-trainer" else d
    sizes = d if trainer == "gmpo-trainer" else [x.expm1() for x in d]
    low = [((x < -clip[0]) & (s < 0)).double() for x, s in zip(sizes, a, strict=True)]
    high = [((x > clip[1]) & (s > 0)).double() for x, s in zip(sizes, a, strict=True)]
    share = {"low": torch.cat(low).mean(), "high": torch.cat(high).mean()}
    share["region"] = share["low"] + share["high"]
    return {f"clip_ratio/{side}_mean": x for side, x in share.items()} | {
        "clip_ratio/low_min": torch.stack([x.mean() for x in low]).min(),
        "clip_ratio/high_max": torch.stack([x.mean() for x in high]).max(),
    }


def advantages(window: Sequences, earned: Tensor | None = None) -> Tensor:
    """GRPO's: the reward less its group's mean, over the group's standard deviation + 1e-4, (N,)."""
    r = stored_window.rewards(window) if earned is None else earned
    return ((r - r.mean(1, keepdim=True)) / (r.std(1, keepdim=True) + 1e-4)).flatten()


def grpo(
    window: Sequences,
    reference: Reference,
    settings: dict[str, Any],
    tools: Callable[[Tensor], Tensor] | None,
    generation: Generation | None,
    model: Any,
    ratio: Callable[[Tensor, Tensor], Tensor] | None = None,
    earned: Tensor | None = None,
) -> Tensor:
    """Family `policy` on the model's hidden states and head, the window as one batch; `tools`: token ids -> tool mask.

    `ratio`: log-probs (N, T) and mask -> the sampler's importance ratio. `earned`: rewards, where they are not the window's.
    """
    fam = POLICY
    s = SimpleNamespace(**{**defaults(fam.settings), **head_settings(model), **settings})
    tensors = policy_tensors(window, model, earned)
    if s.beta != 0.0:
        with torch.no_grad():
            tensors["ref_logps"] = padded(completion_logps(stored_window.reference(reference), window))
    if generation is not None:
        s.steps_per_generation = generation.steps
        tensors["advantages"] = generation.of(window, advantages(generation.whole, earned))
        tensors["num_items_in_batch"] = torch.tensor(float(sum(len(t) - n for t, n in generation.whole)))
        with torch.no_grad():
            tensors["old_logps"] = padded(completion_logps(generation.old, window))
    if tools is not None:
        mask, tokens = tensors["mask"], tensors["ids"]
        assert mask is not None and tokens is not None
        kept = mask.bool() & (tools(tokens) != 0)
        tensors |= {"mask": kept.double(), "num_items_in_batch": torch.tensor(float(kept.sum()))}
    if ratio is not None:
        assert tensors["mask"] is not None
        with torch.no_grad():
            found = padded(completion_logps(model, window))
            tensors["importance_sampling_ratio"] = ratio(found, tensors["mask"])
    inputs = Inputs(Case("policy", 0, "fp64"), s, tensors, (), {})
    return fam.oracle(inputs)["loss"]


def head_settings(model: Any) -> dict[str, Any]:
    """What lies between the head's product and the logits, as settings of a loss family."""
    config = model.config.get_text_config()
    return {
        "softcap": getattr(config, "final_logit_softcapping", None),
        "logit_scale": getattr(config, "logit_scale", None) or 1.0,
    }


def policy_tensors(window: Sequences, model: Any, earned: Tensor | None = None) -> dict[str, Tensor | None]:
    """A window as the inputs of family `policy`: hidden states and head of the model, advantages of the stored rewards."""
    backbone = (model.get_base_model() if hasattr(model, "get_base_model") else model).base_model
    hidden = backbone(**training_step.rows([t for t, _ in window]), use_cache=False).last_hidden_state
    pieces = [hidden[i, start - 1 : len(t) - 1] for i, (t, start) in enumerate(window)]
    counts = [len(t) - start for t, start in window]
    mask = padded([torch.ones(n, dtype=torch.int64) for n in counts]).double()
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
        "hidden": padded(pieces),
        "weight": head.weight,
        "bias": head.bias,
        "ids": padded([torch.tensor(t[start:]) for t, start in window]),
        "mask": mask,
        "completion_mask": mask,
        "advantages": advantages(window, earned),
        "num_items_in_batch": torch.tensor(float(sum(counts))),
        **dict.fromkeys(none),
        "lora_a": None,
        "lora_b": None,
    }


def padded(pieces: list[Tensor]) -> Tensor:
    """Pieces of unequal lengths as the rows of one tensor, zeros at their ends."""
    width = max(len(x) for x in pieces)
    return torch.stack([pad(x, (*(0, 0) * (x.dim() - 1), 0, width - len(x))) for x in pieces])


def distillation(
    window: Sequences, teacher: Any, beta: float, tools: Callable[[Tensor], Tensor] | None, model: Any
) -> Tensor:
    """Mean over the completion tokens of the window of the generalised JSD to the teacher; a tool's are left out."""
    with torch.no_grad():
        q = completion_logits(teacher, window)
    terms = []
    for (z, tokens), (w, _) in zip(completion_logits(model, window), q, strict=True):
        lp, lq = (torch.log_softmax(x, -1) for x in (z, w))
        gone = torch.zeros_like(lp, dtype=torch.bool)
        found = divergence(lp, lq, gone, gone, beta).sum(-1)
        terms.append(found if tools is None else found[tools(tokens).bool()])
    return torch.cat(terms).mean()
