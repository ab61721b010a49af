"""Losses on log-ratios by their definitions, in float64: preference pairs (DPO and its kin), unpaired labels (KTO).

Δ_w and Δ_l are log π - log π_ref of the chosen and the rejected completion, summed over its tokens; d = Δ_w - Δ_l.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from parity.trainers.definitions import windows
from parity.trainers.definitions.training_step import completion_logits, completion_logps, taken
from parity.trainers.rig import stored_window
from parity.trainers.rig.stored_window import Reference, Sequences

Losses = Mapping[str, Callable[["Pairs"], Tensor]]


class Pairs:
    """What the losses of a batch of pairs are made of.

    Attributes:
        s: beta, smoothing, divergence, alpha, ld_alpha and tau.
        logps, ref: log-probs (N,) of chosen and rejected, weighted by ld_alpha behind the shorter one's length (LD-DPO,
            arXiv 2409.06411).
        scores: f'(π/π_ref) of chosen and rejected, (N,) (f-DPO, arXiv 2309.16240), 0 where they are equal.
        lengths: tokens of chosen and rejected, (N,).
        tokens: log-probs (T_i,) of the chosen.
    """

    def __init__(self, window: tuple[Sequences, Sequences], reference: Reference, s: SimpleNamespace, model: Any):
        token_logps = [completion_logps(model, w) for w in window]
        with torch.no_grad():
            base = [completion_logps(stored_window.reference(reference), w) for w in window]
        self.s, self.tokens, self.token_logps = s, token_logps[0], token_logps
        self.logps, self.ref = _summed(token_logps, s.ld_alpha), _summed(base, s.ld_alpha)
        self.ratios = [a - b for a, b in zip(self.logps, self.ref, strict=True)]
        self.scores = [_score(r, s.divergence, s.alpha) for r in self.ratios]
        self.lengths = [torch.tensor([len(t) for t in side], dtype=torch.float64) for side in token_logps]

    @property
    def d(self) -> Tensor:
        """Difference of the scores."""
        return self.scores[0] - self.scores[1]

    @property
    def averaged(self) -> Tensor:
        """Difference of the scores per token."""
        return self.scores[0] / self.lengths[0] - self.scores[1] / self.lengths[1]

    def sorted_difference(self, policy: Tensor, reference: Tensor) -> Tensor:
        """Order statistics against order statistics."""
        return policy.sort().values - reference.sort().values

    def smoothed(self, d: Tensor) -> Tensor:
        """-(1 - ε) log σ(βd) - ε log σ(-βd)."""
        e, b = self.s.smoothing, self.s.beta
        return -(1 - e) * logsigmoid(b * d) - e * logsigmoid(-b * d)


def _summed(sides: Sequence[Sequence[Tensor]], ld_alpha: float) -> list[Tensor]:
    shared = [min(len(a), len(b)) for a, b in zip(*sides, strict=True)]
    return [
        torch.stack([t[:n].sum() + ld_alpha * t[n:].sum() for t, n in zip(side, shared, strict=True)]) for side in sides
    ]


def _score(ratio: Tensor, divergence: str, alpha: float) -> Tensor:
    """f'(u), u = exp(ratio), as f-DPO's table 1: log u, 1 - 1/u, log(2u/(1 + u)), (1 - u^-α)/α.

    The paper's constant cancels between chosen and rejected; here f'(1) = 0, which losses per token need.
    """
    if divergence == "forward_kl":
        return 1 - torch.exp(-ratio)
    if divergence == "js_divergence":
        return math.log(2) + logsigmoid(ratio)
    if divergence == "alpha_divergence":
        return (1 - torch.exp(-alpha * ratio)) / alpha
    return ratio


def _exo(p: Pairs) -> Tensor:
    e, z = p.s.smoothing, p.s.beta * p.d
    chosen = torch.sigmoid(z) * (logsigmoid(z) - math.log1p(-e))
    return chosen + torch.sigmoid(-z) * (logsigmoid(-z) - math.log(e))


def _robust(p: Pairs) -> Tensor:
    e, z = p.s.smoothing, p.s.beta * p.d
    return (-(1 - e) * logsigmoid(z) + e * logsigmoid(-z)) / (1 - 2 * e)


def _positive(x: Tensor) -> Tensor:
    """max(0, x). Not relu: its backward asks whether the result is above 0, and a replica rounds a 0 to either side."""
    return torch.where(x > 0, x, torch.zeros_like(x))


def _nca(p: Pairs) -> Tensor:
    w, loser = (p.s.beta * r for r in p.ratios)
    return -logsigmoid(w) - 0.5 * logsigmoid(-w) - 0.5 * logsigmoid(-loser)


def _discopop(p: Pairs) -> Tensor:
    z = p.s.beta * p.d
    share = torch.sigmoid(z / p.s.tau)
    return -logsigmoid(z) * (1 - share) + torch.exp(-z) * share


DPO: Losses = {
    "sigmoid": lambda p: -logsigmoid(p.s.beta * p.d),  # DPO, arXiv 2305.18290
    "hinge": lambda p: _positive(1 - p.s.beta * p.d),  # SLiC-HF, arXiv 2305.10425
    "ipo": lambda p: (p.averaged - 1 / (2 * p.s.beta)) ** 2,  # arXiv 2310.12036, per token as its authors confirmed
    "exo_pair": _exo,  # arXiv 2402.00856, equation 16
    "nca_pair": _nca,  # arXiv 2402.05369
    "robust": _robust,  # arXiv 2403.00409
    "bco_pair": lambda p: -logsigmoid(p.s.beta * p.ratios[0]) - logsigmoid(-p.s.beta * p.ratios[1]),  # shift 0
    "sppo_hard": lambda p: (p.ratios[0] - 0.5 / p.s.beta) ** 2 + (p.ratios[1] + 0.5 / p.s.beta) ** 2,  # 2405.00675
    "aot": lambda p: p.smoothed(p.sorted_difference(p.logps[0] - p.logps[1], p.ref[0] - p.ref[1])),  # 2406.05882
    "aot_unpaired": lambda p: p.smoothed(p.sorted_difference(*p.ratios)),
    "apo_zero": lambda p: 1 - torch.sigmoid(p.s.beta * p.ratios[0]) + torch.sigmoid(p.s.beta * p.ratios[1]),
    "apo_down": lambda p: torch.sigmoid(p.s.beta * p.ratios[0]) + 1 - torch.sigmoid(p.s.beta * p.d),  # 2408.06266
    "discopop": _discopop,  # arXiv 2406.08414, equation 5
    "sft": lambda p: -torch.cat(list(p.tokens)).mean().expand(len(p.tokens)),
    "sigmoid_norm": lambda p: -logsigmoid(p.s.beta * p.averaged),  # per token, as SimPO's margin
}
"""Loss type of DPOTrainer -> loss of each pair, (N,)."""


MIXED = {"mpo": {"sigmoid": 0.8, "bco_pair": 0.2, "sft": 1.0}}
"""Name of ours -> loss types of DPOTrainer and their weights; MPO (arXiv 2411.10442, equation 2)."""


def dpo(window: tuple[Sequences, Sequences], reference: Reference, s: SimpleNamespace, model: Any) -> Tensor:
    """The mean over the pairs, each times its WPO weight where that is on (arXiv 2406.11827, equation 2)."""
    pairs = Pairs(window, reference, s, model)
    loss = torch.stack([w * DPO[name](pairs) for name, w in MIXED.get(s.loss, {s.loss: 1.0}).items()]).sum(0)
    if s.weighting:
        weights = [_alignment(model, w) for w in window]
        loss = loss * weights[0] * weights[1]
    return loss.mean()


def _alignment(model: Any, window: Sequences) -> Tensor:
    """exp of the mean over a completion's tokens of log p(token) - log Σ p², without gradient, (N,)."""
    out = []
    with torch.no_grad():
        for z, tokens in completion_logits(model, window):
            logps = torch.log_softmax(z, -1)
            actual = taken(logps, tokens)
            out.append((actual - torch.logsumexp(2 * logps, -1)).mean().exp())
    return torch.stack(out)


CPO = ("sigmoid", "hinge", "ipo", "simpo", "alphapo")
"""Loss types of CPOTrainer."""


def cpo(window: tuple[Sequences, Sequences], s: SimpleNamespace, model: Any) -> Tensor:
    """mean of f(r_w - r_l) plus nll·(-Σ log p / N) over the N tokens of the chosen completions (arXiv 2401.08417, 3).

    r is log π of a completion, per token for ipo and simpo; (1 - exp(-a·r))/a with AlphaPO's exponent a (arXiv
    2501.03884). f as DPO's; simpo: sigmoid of β(r_w - r_l) - γ (arXiv 2405.14734); alphapo: simpo with nll = 0.
    """
    tokens = [completion_logps(model, w) for w in window]
    averaged = s.loss in ("ipo", "simpo", "alphapo")
    r = [torch.stack([t.mean() if averaged else t.sum() for t in side]) for side in tokens]
    if s.power:
        r = [(1 - torch.exp(-s.power * x)) / s.power for x in r]
    z = s.beta * (r[0] - r[1]) - (s.gamma if s.loss in ("simpo", "alphapo") else 0.0)
    if s.loss == "hinge":
        preferred = _positive(1 - z)
    elif s.loss == "ipo":
        preferred = (r[0] - r[1] - 1 / (2 * s.beta)) ** 2
    else:
        preferred = -(1 - s.smoothing) * logsigmoid(z) - s.smoothing * logsigmoid(-z)
    weight = 0.0 if s.loss == "alphapo" else s.nll
    return preferred.mean() - weight * torch.cat(list(tokens[0])).mean()


def log_odds(tokens: Sequence[Tensor]) -> Tensor:
    """log p - log(1 - p) of each completion, log p the mean of its tokens' log-probs, (N,)."""
    logps = torch.stack([t.mean() for t in tokens])
    return logps - torch.log(-torch.expm1(logps))


def orpo(window: tuple[Sequences, Sequences], beta: float, model: Any) -> Tensor:
    """-Σ log p / N over the N tokens of chosen prompts and completions, less β·mean of log σ(log odds_w - log odds_l).

    odds = p/(1 - p), log p the mean over a completion's tokens (arXiv 2403.07691, equations 3 to 7; its authors' code
    takes the likelihood of the prompt too).
    """
    odds = [log_odds(completion_logps(model, side)) for side in window]
    whole = torch.cat(completion_logps(model, [(tokens, 1) for tokens, _ in window[0]]))
    return -whole.mean() - beta * logsigmoid(odds[0] - odds[1]).mean()


def kto(
    window: Sequences, others: Sequences, labels: Sequence[bool], reference: Reference, s: SimpleNamespace, model: Any
) -> Tensor:
    """mean of λ_D (1 - σ(β(Δ - z))) of desirable and λ_U (1 - σ(β(z - Δ))) of undesirable ones (arXiv 2402.01306).

    z = max(0, mean of log π - log π_ref over `others`, completions beside another prompt), without gradient.
    """
    ratios = windows.log_ratios(model, reference, window)
    z = shift(others, reference, model)
    good = s.desirable * (1 - torch.sigmoid(s.beta * (ratios - z)))
    bad = s.undesirable * (1 - torch.sigmoid(s.beta * (z - ratios)))
    return torch.where(torch.tensor(labels), good, bad).mean()


def apo_zero_unpaired(
    window: Sequences,
    labels: Sequence[bool],
    reference: Reference,
    beta: float,
    model: Any,
    weights: tuple[float, float] = (1.0, 1.0),
) -> Tensor:
    """mean of λ_D (1 - σ(βΔ)) of desirable and λ_U σ(βΔ) of undesirable ones (arXiv 2408.06266, equation 7, unpaired).

    KTO's own loss subtracts a KL estimated on the micro-batch, so that it is not a sum over micro-batches; this one is.
    """
    p = torch.sigmoid(beta * windows.log_ratios(model, reference, window))
    return torch.where(torch.tensor(labels), weights[0] * (1 - p), weights[1] * p).mean()


def shift(others: Sequences, reference: Reference, model: Any) -> Tensor:
    """KTO's estimate of the KL on one batch."""
    with torch.no_grad():
        return windows.log_ratios(model, reference, others).mean().clamp(min=0)


def mismatched(window: Sequences) -> Sequences:
    """Each prompt with the completion of the sequence before it, the first with that of the last."""
    completions = [tokens[start:] for tokens, start in window]
    shifted = completions[-1:] + completions[:-1]
    return [(tokens[:start] + c, start) for (tokens, start), c in zip(window, shifted, strict=True)]


def dft(window: Sequences, model: Any) -> Tensor:
    """-Σ p·log p / N over the completion tokens, p without gradient (arXiv 2508.05629)."""
    logps = torch.cat(completion_logps(model, window))
    return -(logps.exp().detach() * logps).sum() / logps.numel()


def smoothed(window: Sequences, smoothing: float, model: Any) -> Tensor:
    """mean over the completion tokens of -(1 - ε) log p(token) - ε·mean over the vocabulary of log p (arXiv 1512.00567)."""
    terms = []
    for z, tokens in completion_logits(model, window):
        table = torch.log_softmax(z, -1)
        terms.append((1 - smoothing) * taken(table, tokens) + smoothing * table.mean(-1))
    return -torch.cat(terms).mean()


def online_ipo(window: tuple[Sequences, Sequences], reference: Reference, beta: float, model: Any) -> Tensor:
    """mean of (d - 1/(2β))², d of whole completions (arXiv 2310.12036)."""
    chosen, rejected = (windows.log_ratios(model, reference, w) for w in window)
    return ((chosen - rejected - 1 / (2 * beta)) ** 2).mean()
