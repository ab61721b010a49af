"""Controls of family `preference`: a correct float32 loss, from the papers, cut into steps, each a function of those before.

A mutant exchanges one step for one that is wrong.
"""

import math
from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch.nn.functional import softplus

from cases.selftest.controls.logprobs import Pair, Steps, finish, product
from parity.case.inputs import Inputs
from parity.families.head import IGNORE_INDEX
from parity.implementations.implementation import Adapter, Outputs

Work = SimpleNamespace
"""What has been found so far: x, s (settings), head, and the result of every step under its name."""
Step = Callable[[Work], torch.Tensor]


def kept(c: Work) -> torch.Tensor:
    return c.x.ids != IGNORE_INDEX


def lengths(c: Work) -> torch.Tensor:
    """Tokens of each completion, (B,)."""
    return c.kept.sum(1).float()


def tokens(c: Work) -> torch.Tensor:
    return c.head(c.x)[0]


def ref_tokens(c: Work) -> torch.Tensor:
    if c.x.ref_hidden is None:
        return torch.zeros_like(c.tokens)
    with torch.no_grad():
        return c.head(c.x.replace(hidden=c.x.ref_hidden, weight=c.x.ref_weight, bias=c.x.ref_bias))[0]


def share(c: Work) -> torch.Tensor:
    """Weight of each token: `ld_alpha` behind the shorter completion's length, else 1, (B, T)."""
    if c.s.method != "dpo" or c.s.ld_alpha == 1.0:
        return torch.ones_like(c.tokens)
    shorter = torch.minimum(chosen(c.lengths), rejected(c.lengths))
    behind = c.kept.cumsum(1) > torch.cat([shorter, shorter])[:, None]
    return 1 - (1 - c.s.ld_alpha) * behind.to(c.tokens.dtype)


def total(c: Work, of: torch.Tensor) -> torch.Tensor:
    """Of each completion: the sum of its tokens, or their mean."""
    of = of * c.share
    return (of / c.lengths[:, None]).sum(1) if averaged(c.s) else of.sum(1)


def averaged(s: SimpleNamespace) -> bool:
    return bool(s.average or s.method == "orpo" or (s.method == "cpo" and s.loss_type in ("ipo", "simpo")))


def value(c: Work) -> torch.Tensor:
    return total(c, c.tokens)


def ref(c: Work) -> torch.Tensor:
    return total(c, c.ref_tokens)


def ratio(c: Work) -> torch.Tensor:
    return c.value - c.ref


def chosen(of: torch.Tensor) -> torch.Tensor:
    return of[: len(of) // 2]


def rejected(of: torch.Tensor) -> torch.Tensor:
    return of[len(of) // 2 : len(of) // 2 * 2]


def scores(c: Work) -> torch.Tensor:
    """f'(u) of u = exp(ratio)."""
    a, r = c.s.alpha, c.ratio
    return {
        "reverse_kl": lambda: r,
        "forward_kl": lambda: -torch.expm1(-r),
        "js_divergence": lambda: math.log(2) - softplus(-r),
        "alpha_divergence": lambda: -torch.expm1(-a * r) / a,
    }[c.s.divergence]()


def margin(c: Work) -> torch.Tensor:
    return chosen(c.scores) - rejected(c.scores)


def alignment(c: Work) -> torch.Tensor:
    """exp of the mean of log p(token) - log Σ p² over the tokens of a completion, (B,)."""
    x = c.x
    with torch.no_grad(), torch.autocast(x.hidden.device.type, enabled=False):
        p = finish(x, product(x, x.hidden.float())).softmax(-1)
        means = (c.tokens - p.square().sum(-1).log() * c.kept).sum(1) / c.lengths
    return means.exp()


def sure(z: torch.Tensor, e: float) -> torch.Tensor:
    """-(1 - ε) log σ(z) - ε log σ(-z) = log(1 + e^-z) + ε·z."""
    return softplus(-z) + e * z


def dpo(c: Work) -> torch.Tensor:
    s, z = c.s, c.s.beta * c.margin
    w, l = s.beta * chosen(c.ratio), s.beta * rejected(c.ratio)
    per_token = c.scores / c.lengths
    each = chosen(per_token) - rejected(per_token)
    orders = (
        (chosen(c.value) - rejected(c.value)).sort().values - (chosen(c.ref) - rejected(c.ref)).sort().values,
        chosen(c.ratio).sort().values - rejected(c.ratio).sort().values,
    )
    e, one = s.smoothing, torch.ones_like(z)
    p = torch.sigmoid(z)
    return {
        "sigmoid": lambda: sure(z, e),
        "hinge": lambda: (1 - z).clamp(min=0),
        "ipo": lambda: (each - 0.5 / s.beta).square(),
        "exo_pair": lambda: p * (-softplus(-z) - (one - e).log()) - (1 - p) * (softplus(z) + (one * e).log()),
        "nca_pair": lambda: softplus(-w) + 0.5 * softplus(w) + 0.5 * softplus(l),
        "robust": lambda: ((1 - e) * softplus(-z) - e * softplus(z)) / (1 - 2 * e),
        "bco_pair": lambda: softplus(-w) + softplus(l),
        "sppo_hard": lambda: (chosen(c.ratio) - 0.5 / s.beta) ** 2 + (rejected(c.ratio) + 0.5 / s.beta) ** 2,
        "aot": lambda: sure(s.beta * orders[0], e),
        "aot_unpaired": lambda: sure(s.beta * orders[1], e),
        "apo_zero": lambda: torch.sigmoid(-w) + torch.sigmoid(l),
        "apo_down": lambda: torch.sigmoid(w) + torch.sigmoid(-z),
        "discopop": lambda: softplus(-z) * torch.sigmoid(-z / s.tau) + (-z).exp() * torch.sigmoid(z / s.tau),
        "sigmoid_norm": lambda: sure(s.beta * each, 0.0),
    }[s.loss_type]()


def cpo(c: Work) -> torch.Tensor:
    s, d = c.s, c.margin
    if s.loss_type == "hinge":
        return (1 - s.beta * d).clamp(min=0)
    if s.loss_type == "ipo":
        return (d - 0.5 / s.beta).square()
    return sure(s.beta * d - (s.gamma if s.loss_type == "simpo" else 0.0), s.smoothing)


def orpo(c: Work) -> torch.Tensor:
    odds = c.value - torch.log1p(-c.value.exp())
    return c.s.beta * softplus(rejected(odds) - chosen(odds))


def kto(c: Work) -> torch.Tensor:
    z = c.s.kl if c.s.loss_type == "kto" else 0.0
    sign = torch.where(c.x.labels, 1.0, -1.0)
    weight = torch.where(c.x.labels, c.s.desirable, c.s.undesirable)
    return weight * torch.sigmoid(-sign * c.s.beta * (c.ratio - z))


def nll(c: Work) -> torch.Tensor:
    return -chosen(c.tokens).sum() / chosen(c.lengths).sum()


def compared(c: Work) -> torch.Tensor:
    return {"dpo": dpo, "cpo": cpo, "orpo": orpo, "kto": kto}[c.s.method](c)


def weights(c: Work) -> torch.Tensor:
    """Of each pair."""
    wanted = c.s.method == "dpo" and c.s.weighting and c.s.loss_type not in ("aot", "aot_unpaired")
    return chosen(c.alignment) * rejected(c.alignment) if wanted else torch.ones_like(c.compared)


def loss(c: Work) -> torch.Tensor:
    return (c.compared * c.weights).mean() + (c.s.nll * c.nll * c.weights.mean() if c.s.method != "kto" else 0.0)


ORDER: dict[str, Step] = {
    step.__name__: step
    for step in (kept, lengths, tokens, ref_tokens, share, value, ref, ratio, scores, margin)
    + (compared, alignment, weights, nll, loss)
}
"""The steps in the order in which they are taken."""


def loss_of(head: Callable[[Inputs], Pair] | None = None, **edits: Step) -> Adapter:
    """An adapter of family `preference` that takes the steps of `ORDER` except for those in `edits`.

    `head`: from inputs to log-probs and entropies, (B, T).
    """

    def call(x: Inputs) -> Outputs:
        c = Work(x=x, s=x.settings, head=head or Steps().head)
        for name, step in (ORDER | edits).items():
            setattr(c, name, step(c))
        out = {"loss": c.loss}
        if c.s.method != "kto":
            for name, of in (("logps", c.value), ("rewards", c.s.beta * c.ratio)):
                out |= {f"chosen_{name}": chosen(of).detach(), f"rejected_{name}": rejected(of).detach()}
            out |= {"nll_loss": c.nll.detach()} if c.s.nll else {}
        return out

    return call
