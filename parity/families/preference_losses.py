"""Preference losses by the log-probs of whole completions: a formula a line, its paper beside it.

Δ_w and Δ_l are log π - log π_ref of the chosen and the rejected completion, summed over its tokens; d = Δ_w - Δ_l.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


@dataclasses.dataclass(frozen=True)
class Pairs:
    """What the losses of a batch of N pairs are made of, each of chosen and rejected."""

    s: SimpleNamespace  # beta, smoothing, divergence, alpha and tau
    logps: Sequence[Tensor]  # log-probs (…, N) of the completions by the policy
    ref: Sequence[Tensor]  # and by the reference
    lengths: Sequence[Tensor]  # their tokens, (N,)
    nll: Tensor  # minus the mean log-prob of the tokens of the chosen, (…)

    @functools.cached_property
    def ratios(self) -> list[Tensor]:
        """Δ, (…, N)."""
        return [a - b for a, b in zip(self.logps, self.ref, strict=True)]

    @functools.cached_property
    def scores(self) -> list[Tensor]:
        """f'(π/π_ref), (…, N) (f-DPO, arXiv 2309.16240), 0 where they are equal."""
        return [_score(r, self.s.divergence, self.s.alpha) for r in self.ratios]

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
        return smoothed(self.s.beta * d, self.s.smoothing)


def sigma(x: Tensor) -> Tensor:
    """σ(x), beyond 0 as it is and below as 1 - σ(-x): correct code has either, and where it is this one, its gradient loses its
    digits. The mean of both loses half as many."""
    return torch.where(x > 0, torch.sigmoid(x), 1 - torch.sigmoid(-x))


def smoothed(z: Tensor, e: float) -> Tensor:
    """-(1 - ε) log σ(z) - ε log σ(-z)."""
    return -(1 - e) * logsigmoid(z) - e * logsigmoid(-z)


def _score(ratio: Tensor, divergence: str, alpha: float) -> Tensor:
    """f'(u), u = exp(ratio), as f-DPO's table 1: log u, 1 - 1/u, log(2u/(1 + u)), (1 - u^-α)/α. The paper's constant
    cancels between chosen and rejected; here f'(1) = 0, which losses per token need."""
    if divergence == "forward_kl":
        return 1 - torch.exp(-ratio)
    if divergence == "js_divergence":
        return math.log(2) + logsigmoid(ratio)
    if divergence == "alpha_divergence":
        return (1 - torch.exp(-alpha * ratio)) / alpha
    return ratio


def _exo(p: Pairs) -> Tensor:
    e, z = p.s.smoothing, p.s.beta * p.d
    chosen = sigma(z) * (logsigmoid(z) - math.log1p(-e))
    return chosen + sigma(-z) * (logsigmoid(-z) - math.log(e))


def _robust(p: Pairs) -> Tensor:
    e, z = p.s.smoothing, p.s.beta * p.d
    return (-(1 - e) * logsigmoid(z) + e * logsigmoid(-z)) / (1 - 2 * e)


def _nca(p: Pairs) -> Tensor:
    w, loser = (p.s.beta * r for r in p.ratios)
    return -logsigmoid(w) - 0.5 * logsigmoid(-w) - 0.5 * logsigmoid(-loser)


def _discopop(p: Pairs) -> Tensor:
    z = p.s.beta * p.d
    return -logsigmoid(z) * sigma(-z / p.s.tau) + torch.exp(-z) * sigma(z / p.s.tau)


DPO: Mapping[str, Callable[[Pairs], Tensor]] = {
    "sigmoid": lambda p: -logsigmoid(p.s.beta * p.d),  # DPO, arXiv 2305.18290
    "hinge": lambda p: torch.relu(1 - p.s.beta * p.d),  # SLiC-HF, arXiv 2305.10425
    "ipo": lambda p: (p.averaged - 1 / (2 * p.s.beta)) ** 2,  # arXiv 2310.12036, per token as its authors confirmed
    "exo_pair": _exo,  # arXiv 2402.00856, equation 16
    "nca_pair": _nca,  # arXiv 2402.05369
    "robust": _robust,  # arXiv 2403.00409
    "bco_pair": lambda p: -logsigmoid(p.s.beta * p.ratios[0]) - logsigmoid(-p.s.beta * p.ratios[1]),  # shift 0
    "sppo_hard": lambda p: (p.ratios[0] - 0.5 / p.s.beta) ** 2 + (p.ratios[1] + 0.5 / p.s.beta) ** 2,  # 2405.00675
    "aot": lambda p: p.smoothed(p.sorted_difference(p.logps[0] - p.logps[1], p.ref[0] - p.ref[1])),  # 2406.05882
    "aot_unpaired": lambda p: p.smoothed(p.sorted_difference(*p.ratios)),
    "apo_zero": lambda p: sigma(-p.s.beta * p.ratios[0]) + sigma(p.s.beta * p.ratios[1]),
    "apo_down": lambda p: sigma(p.s.beta * p.ratios[0]) + sigma(-p.s.beta * p.d),  # 2408.06266
    "discopop": _discopop,  # arXiv 2406.08414, equation 5
    "sft": lambda p: p.nll.unsqueeze(-1).expand_as(p.logps[0]),
    "sigmoid_norm": lambda p: -logsigmoid(p.s.beta * p.averaged),  # per token, as SimPO's margin
}
"""Loss type of DPO -> loss of each pair, (…, N)."""
CDPO = {**DPO, "sigmoid": lambda p: p.smoothed(p.d) if p.s.smoothing else DPO["sigmoid"](p)}
"""With conservative DPO's smoothing (Mitchell 2023, A note on DPO with noisy preferences), which TRL's trainers do not have."""
SCORED = ("sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "robust", "discopop")
"""DPO's losses that f-divergences are defined for."""
DIVERGENCES = ("reverse_kl", "forward_kl", "js_divergence", "alpha_divergence")
"""Of f-DPO, see `Pairs.scores`."""
ONLINE: Mapping[str, Callable[[Pairs], Tensor]] = {
    "sigmoid": DPO["sigmoid"],
    "ipo": lambda p: (p.d - 1 / (2 * p.s.beta)) ** 2,
}
"""Loss type of OnlineDPOTrainer -> loss of each pair; ipo of whole completions."""
CPO = ("sigmoid", "hinge", "ipo", "simpo", "alphapo")
"""Loss types of CPO."""
TPO = ("sigmoid", "hinge", "ipo", "tpo-l")
"""Loss types of TPO."""
AVERAGED = ("ipo", "simpo", "alphapo", "tpo-l")
"""Those of CPO and TPO that take the mean of a completion's log-probs, not their sum."""


def cpo(r: Sequence[Tensor], s: SimpleNamespace, loss: str) -> Tensor:
    """f(r_w - r_l) of each pair (arXiv 2401.08417, 3), (…, N). r is log π of a completion, per token in `AVERAGED`,
    of which `alphapo` makes another reward. f as DPO's; simpo, alphapo and tpo-l: sigmoid
    of β(r_w - r_l) - γ (arXiv 2405.14734, 2405.16681)."""
    r = [alphapo(x, s.power) for x in r]
    z = s.beta * (r[0] - r[1]) - (s.gamma if loss in AVERAGED and loss != "ipo" else 0.0)
    if loss == "hinge":
        return torch.relu(1 - z)
    if loss == "ipo":
        return (r[0] - r[1] - 1 / (2 * s.beta)) ** 2
    return smoothed(z, s.smoothing)


def alphapo(r: Tensor, power: float) -> Tensor:
    """(1 - exp(-a·r))/a with AlphaPO's exponent a (arXiv 2501.03884), r where it is 0."""
    return (1 - torch.exp(-power * r)) / power if power else r


def log_odds(means: Tensor) -> Tensor:
    """log p - log(1 - p) of each completion, log p the mean of its tokens' log-probs (ORPO, arXiv 2403.07691), (…, N)."""
    return means - torch.log(-torch.expm1(means))


def unpaired(ratios: Tensor, labels: Tensor, s: SimpleNamespace, z: Tensor | None) -> Tensor:
    """KTO's loss of each completion, (…, N), by its log-ratio and label: λ_D (1 - σ(β(Δ - z))) of desirable and
    λ_U (1 - σ(β(z - Δ))) of undesirable ones (arXiv 2402.01306); `z` None: apo_zero_unpaired, λ_D (1 - σ(βΔ)) and λ_U σ(βΔ).

    KTO's own z is a KL estimated on the micro-batch, so that the loss is not a sum over micro-batches; that one is (arXiv
    2408.06266, equation 7, unpaired).
    """
    if z is None:
        return torch.where(labels, s.desirable * sigma(-s.beta * ratios), s.undesirable * sigma(s.beta * ratios))
    good, bad = (sigma(-s.beta * x) for x in (ratios - z, z - ratios))
    return torch.where(labels, s.desirable * good, s.undesirable * bad)
