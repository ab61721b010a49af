"""The loss of every trainer on a stored window, by its definition: a formula a line, its paper beside it, in float64.

Each is a mean over the window, however a trainer cuts it into micro-batches. What the preference losses make of log-probs
is in `parity.families.preference_losses`.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, pad

from parity.case.case import Case
from parity.case.inputs import Inputs, Setting, defaults
from parity.families import preference_losses
from parity.families.divergence import divergence
from parity.families.policy import FAMILY as POLICY
from parity.families.policy_losses import divergence as k3
from parity.families.policy_losses import off_policy_mask
from parity.families.preference_losses import AVERAGED, DIVERGENCES, DPO, ONLINE, Pairs, log_odds, unpaired
from parity.trainers.definitions.baselines import mean
from parity.trainers.definitions.scored import Scored, completion_logps, entropies, rows
from parity.trainers.rig import drive, stored_window
from parity.trainers.rig.stored_window import Sequences, Window

OPTIONS = {
    "smoothing": ("label_smoothing", Setting(0.0, "of labels; SFT: label_smoothing_factor", (0.0, 0.1))),
    "penalty": ("missing_eos_penalty", Setting(0.0, "completions are cut off after six tokens", (0.0, 2.0))),
    "weight": ("reward_weights", Setting(1.0, "online DPO: of its reward function", (1.0, -1.0))),
    "divergence": ("f_divergence_type", Setting("reverse_kl", "f-DPO", DIVERGENCES)),
    "alpha": ("f_alpha_divergence_coef", Setting(0.5, "of alpha_divergence", (0.5, 0.3))),
    "ld_alpha": ("ld_alpha", Setting(1.0, "weight of the tokens behind the shorter one's length", (1.0, 0.4))),
    "weighting": ("use_weighting", Setting(False, "WPO", (False, True))),
    "tau": ("discopop_tau", Setting(0.05, "temperature of discopop", (0.05, 0.5))),
    "nll": (
        "cpo_alpha",
        Setting(1.0, "weight of the negative log-likelihood, of chosen or gold completions", (1.0, 0.4, 0.0)),
    ),
    "gamma": ("simpo_gamma", Setting(0.5, "margin of SimPO and TPO-L", (0.5, 1.2))),
    "power": ("alpha", Setting(0.0, "CPO: exponent of AlphaPO's rewards", (0.0, 0.3, -0.3))),
    "desirable": ("desirable_weight", Setting(1.0, "KTO", (1.0, 0.7))),
    "undesirable": ("undesirable_weight", Setting(1.0, "KTO", (1.0, 1.3))),
    "whole": ("completion_only_loss", Setting(False, "SFT: off, prompts are trained on", (False, True))),
    "eval_packed": ("eval_packing", Setting(False, "SFT: in evaluation alone", (False, True))),
    "precomputed": ("precompute_ref_log_probs", Setting(False, "before training", (False, True))),
    "prepared": ("dataset_num_proc", Setting(None, "in how many processes the dataset is prepared", (None, 2))),
}
"""Setting of a loss -> the field of the trainer's config, and its values."""
PLAIN = {"beta": 0.0, "tools": False, "temperature": 1.0, "split": "8x1", "ranks": 1} | {
    name: setting.default for name, (_, setting) in OPTIONS.items()
}
"""Settings of a loss that are not told."""
MIXED = {
    "mpo": {"sigmoid": 0.8, "bco_pair": 0.2, "sft": 1.0},
    "sum": {"sigmoid": 1.0, "bco_pair": 1.0},
    "sigmoid_ipo": {"sigmoid": 0.7, "ipo": 0.3},
}
"""Name of ours -> loss types of DPOTrainer and their weights; MPO (arXiv 2411.10442, equation 2); two without weights; a loss of
means beside another."""


@dataclasses.dataclass(frozen=True)
class Generation:
    """What a window is a part of: all sequences generated together, by which policy, for how many optimizer steps."""

    whole: Sequences
    old: Any
    steps: int


@dataclasses.dataclass
class Loss:
    """The loss of a window, a function of the float64 model."""

    window: Window  # what it is a mean over
    s: SimpleNamespace  # `loss`, `beta`, `model`, and what else of `PLAIN` is away from it; distillation's `teacher`
    reference: Any = ""  # where it is not the saved model of `s`
    generation: Generation | None = None  # what it is a part of, where ratios are to another policy than the model
    earned: Tensor | None = None  # rewards, where they are not the window's
    scale: str = "group"  # of `advantages`
    # more settings of family `policy`; `epsilon` and `epsilon_high` of every clipped ratio
    policy: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    # log-probs (N, T) and mask -> the sampler's importance ratio
    ratio: Callable[[Tensor, Tensor], Tensor] | None = None
    sampled: Tensor | None = None  # log-probs (N, T) by the sampler, where GRPO masks sequences by them

    def __post_init__(self) -> None:
        self.s = SimpleNamespace(**PLAIN | vars(self.s))
        self.reference = self.reference or self.s.model

    def __call__(self, model: Any) -> Tensor:
        return LOSSES[self.window.trainer](self, model)

    def scored(self, model: Any, window: Sequences | None = None) -> Scored:
        """The window, or another one, by the model and the reference."""
        return Scored(model, self.window.sequences if window is None else window, self.reference)

    def sides(self, model: Any) -> list[Scored]:
        """Chosen and rejected completions, one batch of the model."""
        chosen, rejected = self.window.pair(self.s.penalty, self.s.weight)
        both = self.scored(model, [*chosen, *rejected])
        return [both.part(slice(0, len(chosen))), both.part(slice(len(chosen), None))]

    def clip(self, default: float) -> tuple[float, float]:
        return self.policy.get("epsilon", default), self.policy.get("epsilon_high", default)

    def counted(self, tokens: Tensor) -> Tensor:
        """Where a token is the policy's own, and not a tool's."""
        return stored_window.external(tokens).bool() if self.s.tools else torch.ones_like(tokens, dtype=torch.bool)

    @property
    def whole(self) -> Sequences:
        """All that was generated together."""
        return self.window.sequences if self.generation is None else self.generation.whole

    def of_window(self, values: Tensor) -> Tensor:
        """The values of the window's sequences out of those of all that was generated together."""
        return values[[self.whole.index(sequence) for sequence in self.window.sequences]] if self.generation else values

    def old(self, tokens: list[Tensor]) -> list[Tensor]:
        """Log-probs by the policy that generated: the model itself, whose are `tokens`, or an older one."""
        if self.generation is None:
            return [t.detach() for t in tokens]
        with torch.no_grad():
            return completion_logps(self.generation.old, self.window.sequences)


def sft(a: Loss, model: Any) -> Tensor:
    """-Σ log p / N over the N completion tokens. dft: -Σ p·log p / N, p without
    gradient (arXiv 2508.05629). Smoothed: -(1 - ε) log p(token) - ε·mean over the vocabulary of log p (arXiv
    1512.00567)."""
    scored, e = Scored(model, a.window.sequences), a.s.smoothing
    if e:
        pairs = zip(scored.tokens, scored.tables, strict=True)
        return -torch.cat([(1 - e) * own + e * table.mean(-1) for own, table in pairs]).mean()
    logps = torch.cat(scored.tokens)
    return -((logps.exp().detach() if a.s.loss == "dft" else 1.0) * logps).sum() / logps.numel()


def pairs_of(sides: Sequence[Scored], s: SimpleNamespace) -> Pairs:
    """Chosen and rejected, the tokens weighted by ld_alpha behind the shorter one's length (LD-DPO, arXiv 2409.06411)."""
    policy, reference = ([side.tokens for side in sides], [side.base.tokens for side in sides])
    nll = -torch.cat(list(policy[0])).mean()
    return Pairs(s, _summed(policy, s.ld_alpha), _summed(reference, s.ld_alpha), [x.lengths for x in sides], nll)


def _summed(sides: Sequence[Sequence[Tensor]], ld_alpha: float) -> list[Tensor]:
    if ld_alpha == 1.0:
        return [torch.stack([t.sum() for t in side]) for side in sides]
    shared = [min(len(a), len(b)) for a, b in zip(*sides, strict=True)]
    pairs = [zip(side, shared, strict=True) for side in sides]
    return [torch.stack([t[:n].sum() + ld_alpha * t[n:].sum() for t, n in side]) for side in pairs]


def dpo(a: Loss, model: Any) -> Tensor:
    """The mean over the pairs, each times its WPO weight where that is on (arXiv 2406.11827, equation 2)."""
    sides = a.sides(model)
    pairs = pairs_of(sides, a.s)
    loss = torch.stack([w * DPO[name](pairs) for name, w in MIXED.get(a.s.loss, {a.s.loss: 1.0}).items()]).sum(0)
    return (loss * _alignment(sides[0]) * _alignment(sides[1]) if a.s.weighting else loss).mean()


def _alignment(side: Scored) -> Tensor:
    """exp of the mean over a completion's tokens of log p(token) - log Σ p², without gradient, (N,)."""
    pairs = zip(side.tokens, side.tables, strict=True)
    return torch.stack([(own - torch.logsumexp(2 * table, -1)).mean().exp() for own, table in pairs]).detach()


def cpo(a: Loss, model: Any) -> Tensor:
    """mean of `preference_losses.cpo` plus nll·(-Σ log p / N) over the N tokens of the chosen completions; alphapo: nll = 0."""
    sides = a.sides(model)
    weight = 0.0 if a.s.loss == "alphapo" else a.s.nll
    return _contrast(a.s, sides) - weight * torch.cat(sides[0].tokens).mean()


def tpo(a: Loss, model: Any) -> Tensor:
    """As `cpo`, the likelihood that of the gold completions (arXiv 2405.16681)."""
    return _contrast(a.s, a.sides(model)) - a.s.nll * torch.cat(completion_logps(model, a.window.gold)).mean()


def _contrast(s: SimpleNamespace, sides: Sequence[Scored]) -> Tensor:
    return preference_losses.cpo([x.means if s.loss in AVERAGED else x.sums for x in sides], s, s.loss).mean()


def orpo(a: Loss, model: Any) -> Tensor:
    """-Σ log p / N over the N tokens of chosen prompts and completions, less β·mean of log σ(log odds_w - log odds_l).
    odds = p/(1 - p), log p the mean over a completion's tokens (arXiv 2403.07691, equations 3 to 7; its authors' code
    takes the likelihood of the prompt too)."""
    sides = a.sides(model)
    whole = torch.cat(completion_logps(model, [(tokens, 1) for tokens, _ in sides[0].window]))
    return -whole.mean() - a.s.beta * logsigmoid(log_odds(sides[0].means) - log_odds(sides[1].means)).mean()


def kto(a: Loss, model: Any) -> Tensor:
    ratios = a.scored(model).ratios
    z = kl_of_others(a, model) if a.s.loss == "kto" else None
    return unpaired(ratios, torch.tensor(a.window.labels), a.s, z).mean()


def kl_of_others(a: Loss, model: Any) -> Tensor:
    """KTO's z of each sequence: max(0, mean of log π - log π_ref over completions beside another prompt of its rank's
    micro-batch), the mean over the micro-batches of all ranks, without gradient, (N,)."""
    batch = int(a.s.split.partition("x")[0])
    with torch.no_grad():
        parts = a.scored(model, a.window.mismatched(batch)).ratios.split(batch * a.s.ranks)
        return torch.cat([ratios.mean().clamp(min=0).expand(len(ratios)) for ratios in parts])


def rloo(a: Loss, model: Any) -> Tensor:
    """-mean of min(ρA, clip(ρ)A), ρ = π/π_old, A the reward minus the mean of the group's others (arXiv 2402.14740). The
    reward is less β(log π_old - log π_ref) of the whole completion."""
    logps = a.scored(model).sums
    r = stored_window.rewards(a.whole) if a.earned is None else a.earned
    with torch.no_grad():
        old = a.scored(model if a.generation is None else a.generation.old).sums  # a forward pass of its own
        if a.s.beta != 0.0:
            then = old if a.generation is None else a.scored(a.generation.old, a.whole).sums
            r = r - a.s.beta * (then - a.scored(model, a.whole).base.sums).view(r.shape)
    advantages = a.of_window((r - (r.sum(1, keepdim=True) - r) / (stored_window.GENERATIONS - 1)).flatten())
    ratio, (low, high) = (logps - old).exp(), a.clip(0.2)
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages).mean()


def gmpo(a: Loss, model: Any) -> Tensor:
    """-mean of A·w·exp(mean over the tokens of d), d = log π/π_old, at most ε_high for A > 0, at least -ε for the others.
    arXiv 2507.20673, equation 4; plus β times GRPO's KL, its mean over each completion. One all of whose tokens are a
    tool's has ratio 1. top_entropy_quantile: the mean of d is over the tokens with the highest entropies of the window.
    GRPO's settings: w is the sampler's ratio of a sequence, 0 where off_policy_mask_threshold masks it; less entropy_coef
    times the mean entropy of those tokens."""
    scored, (low, high) = a.scored(model), a.clip(0.4)
    old = a.old(scored.tokens)
    base = scored.base.tokens if a.s.beta else old
    terms = []
    counted = [a.counted(ids) for ids in scored.completions]
    signs, trained = a.of_window(advantages(a.whole)), [*map(torch.logical_and, counted, uncertain(a, scored))]
    every = zip(scored.tokens, old, base, signs, trusted(a, scored, counted, signs), counted, trained, strict=True)
    for t, o, ref, sign, w, own, kept in every:
        d = torch.where(sign > 0, (t - o).clamp(max=high), (t - o).clamp(min=-low))
        terms.append(-sign * w * mean(d, kept).exp() + a.s.beta * mean(k3(ref - t, None), own))
    loss = torch.stack(terms).mean()
    if "entropy_coef" in a.policy:
        h = [entropies(table)[kept] for table, kept in zip(scored.tables, trained, strict=True)]
        loss = loss - a.policy["entropy_coef"] * torch.cat(h).mean()
    return loss


def trusted(a: Loss, scored: Scored, counted: list[Tensor], signs: Tensor) -> Tensor:
    """The sampler's importance ratio of each sequence, 0 where its log-probs mask the sequence, without gradient, (N,)."""
    mask, logps = padded([own.double() for own in counted]), padded([t.detach() for t in scored.tokens])
    found = torch.ones_like(mask[:, :1]) if a.ratio is None else a.ratio(logps, mask)
    if "off_policy_mask_threshold" in a.policy:
        found = found * off_policy_mask(SimpleNamespace(**a.policy), logps, signs.unsqueeze(-1), a.sampled, mask)
    return found[:, 0]


def uncertain(a: Loss, scored: Scored) -> list[Tensor]:
    """Whether the entropy of each token is among the share `top_entropy_quantile` of the highest of the window, (T_i,)."""
    if "top_entropy_quantile" not in a.policy:
        return [torch.ones_like(c, dtype=torch.bool) for c in scored.completions]
    with torch.no_grad():
        found = [entropies(table) for table in scored.tables]
        least = torch.cat(found).quantile(1 - a.policy["top_entropy_quantile"])
    return [h >= least for h in found]


def beyond(a: Loss, model: Any) -> dict[str, Tensor]:
    """Shares of the tokens (RLOO: sequences) with ρ < 1 - ε and A < 0, and with ρ > 1 + ε_high and A > 0, as they are
    logged. Means over the window, the least and the largest of a sequence. GMPO's bounds are those of log ρ."""
    with torch.no_grad():
        new = completion_logps(model, a.window.sequences)
        d = [n - o for n, o in zip(new, a.old(new), strict=True)]
    spec, (under, over) = a.window.spec, a.clip(math.nan)
    d = [x.sum(0, keepdim=True) for x in d] if spec.clips == "sequences" else d
    sizes = d if spec.clips == "logarithms" else [x.expm1() for x in d]
    signs = a.of_window(advantages(a.whole))
    low = [((x < -under) & (s < 0)).double() for x, s in zip(sizes, signs, strict=True)]
    high = [((x > over) & (s > 0)).double() for x, s in zip(sizes, signs, strict=True)]
    return clip_ratios(low, high)


def clip_ratios(low: Sequence[Tensor], high: Sequence[Tensor]) -> dict[str, Tensor]:
    """What is logged of 1 and 0 for each token of each sequence: whether it lies below, and above, what is clipped."""
    share = {"low": torch.cat(low).mean(), "high": torch.cat(high).mean()}
    share["region"] = share["low"] + share["high"]
    return {f"clip_ratio/{side}_mean": x for side, x in share.items()} | {
        "clip_ratio/low_min": torch.stack([x.mean() for x in low]).min(),
        "clip_ratio/high_max": torch.stack([x.mean() for x in high]).max(),
    }


def advantages(window: Sequences, earned: Tensor | None = None, scale: str = "group") -> Tensor:
    """GRPO's: the reward less its group's mean, over the standard deviation of the group or of the batch + 1e-4, or over
    nothing (none), (N,)."""
    r = stored_window.rewards(window) if earned is None else earned
    apart = r - r.mean(1, keepdim=True)
    if scale == "none":
        return apart.flatten()
    return (apart / ((r.std() if scale == "batch" else r.std(1, keepdim=True)) + 1e-4)).flatten()


def grpo(a: Loss, model: Any) -> Tensor:
    """Family `policy` on the model's hidden states and head, the window as one batch."""
    config = model.config.get_text_config()
    head = {"softcap": getattr(config, "final_logit_softcapping", None)}
    head |= {"logit_scale": getattr(config, "logit_scale", None) or 1.0}
    own = {"loss_type": a.s.loss, "beta": a.s.beta, "max_completion_length": drive.COMPLETION}
    s = SimpleNamespace(**{**defaults(POLICY.settings), **head, **own, **a.policy})
    window = a.window.sequences
    tensors = policy_tensors(window, model) | {"advantages": a.of_window(advantages(a.whole, a.earned, a.scale))}
    if s.beta != 0.0:
        tensors["ref_logps"] = padded(a.scored(model).base.tokens)
    if a.generation is not None:
        s.steps_per_generation = a.generation.steps
        tensors["num_items_in_batch"] = torch.tensor(float(sum(len(t) - n for t, n in a.whole)))
        tensors["old_logps"] = padded(a.old([]))
    if a.s.tools:
        kept = tensors["mask"].bool() & a.counted(tensors["ids"])
        tensors |= {"mask": kept.double(), "num_items_in_batch": torch.tensor(float(kept.sum()))}
    if "top_entropy_quantile" in a.policy:
        tensors["top_entropy_quantile"] = torch.tensor(a.policy["top_entropy_quantile"])
    if a.sampled is not None:
        tensors["sampling_logps"] = a.sampled
    if a.ratio is not None:
        with torch.no_grad():
            found = padded(completion_logps(model, window))
            tensors["importance_sampling_ratio"] = a.ratio(found, tensors["mask"])
    return POLICY.oracle(Inputs(Case("policy", 0, "fp64"), s, tensors, (), {}))["loss"]


def policy_tensors(window: Sequences, model: Any) -> dict[str, Any]:
    """A window as the inputs of family `policy`: hidden states and head of the model; no other policy, no advantages."""
    backbone = (model.get_base_model() if hasattr(model, "get_base_model") else model).base_model
    hidden = backbone(**rows([t for t, _ in window]), use_cache=False).last_hidden_state
    pieces = [hidden[i, start - 1 : len(t) - 1] for i, (t, start) in enumerate(window)]
    counts = [len(t) - start for t, start in window]
    mask = padded([torch.ones(n, dtype=torch.int64) for n in counts]).double()
    head = model.get_output_embeddings()
    absent = "old_logps ref_logps sampling_logps importance_sampling_ratio top_entropy_quantile tool_mask lora_a lora_b"
    given = {"hidden": padded(pieces), "weight": head.weight, "bias": head.bias}
    given |= {"ids": padded([torch.tensor(t[start:]) for t, start in window])}
    given |= {"mask": mask, "completion_mask": mask, "num_items_in_batch": torch.tensor(float(sum(counts)))}
    return dict.fromkeys(absent.split()) | given


def padded(pieces: list[Tensor]) -> Tensor:
    """Pieces of unequal lengths as the rows of one tensor, zeros at their ends."""
    width = max(len(x) for x in pieces)
    return torch.stack([pad(x, (*(0, 0) * (x.dim() - 1), 0, width - len(x))) for x in pieces])


def distillation(a: Loss, model: Any) -> Tensor:
    """Mean over the completion tokens of the window of the generalised JSD to the teacher; a tool's are left out."""
    student = Scored(model, a.window.sequences, a.s.teacher, a.s.temperature)
    pairs = zip(jsd(student, a.s.beta), student.completions, strict=True)
    return torch.cat([terms[a.counted(tokens)] for terms, tokens in pairs]).mean()


def jsd(student: Scored, beta: float) -> list[Tensor]:
    """The generalised JSD to the teacher, which is the student's reference, at each token of each completion, (T_i,)."""
    out = []
    for lp, lq in zip(student.tables, student.base.tables, strict=True):
        gone = torch.zeros_like(lp, dtype=torch.bool)
        out.append(divergence(lp, lq, gone, gone, beta).sum(-1))
    return out


LOSSES: Mapping[str, Callable[[Loss, Any], Tensor]] = {
    "sft-trainer": sft,
    "dpo-trainer": dpo,
    "online-dpo-trainer": lambda a, model: ONLINE[a.s.loss](pairs_of(a.sides(model), a.s)).mean(),
    "cpo-trainer": cpo,
    "orpo-trainer": orpo,
    "tpo-trainer": tpo,
    "kto-trainer": kto,
    "rloo-trainer": rloo,
    "gmpo-trainer": gmpo,
    "grpo-trainer": grpo,
    "distillation-trainer": distillation,
}
