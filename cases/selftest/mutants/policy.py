"""Mutants of family `policy`: one step of a correct loss exchanged for a wrong one; most stand in `losses.toml`."""

import torch

from cases.selftest.controls import policy as right
from cases.selftest.controls.logprobs import Steps, capped, cooled, scaled
from cases.selftest.controls.policy import METRICS, ORDER, Work, loss_of
from cases.selftest.mutants.conduct import around
from cases.selftest.mutants.mutant import Edited
from cases.selftest.mutants.steps import Edit, Wrong, defaults, exchanged, scaled_gradients
from parity.case.inputs import Inputs

READ = (
    "ids mask advantages old_logps ref_logps sampling_logps importance_sampling_ratio previous_ids lora_a lora_b"
).split()


def _straight(x: Inputs, z: torch.Tensor) -> torch.Tensor:
    z = scaled(x, z)
    return cooled(x, z + (capped(x, z) - z).detach() if x.settings.bias != "banned" else capped(x, z))


def _without_embedding_gradient(x: Inputs) -> torch.Tensor:
    if x.settings.head != "tied":
        return x.hidden.float()
    return (x.hidden + x.weight.detach()[x.previous_ids]).float()


def _divided(c: Work, divisor: torch.Tensor, *loss_types: str) -> torch.Tensor:
    """The divisor of some loss types exchanged."""
    return divisor if c.s.loss_type in loss_types else right.divisor(c)


WINDOWED = ("dapo", "cispo", "vespo")


def _twice(c: Work) -> torch.Tensor:
    means = (c.token * c.mask).sum(1, keepdim=True) / c.lengths
    return (means * c.mask).sum() / c.mask.sum().clamp(min=1.0) / c.steps


def _rho(c: Work, change: Edit) -> torch.Tensor:
    rho = right.ratio(c)
    changed = change(rho)
    assert changed is not None
    return rho if c.x.importance_sampling_ratio is None else changed


def _after_kl(c: Work) -> torch.Tensor:
    without = (c.on_policy * c.keep * c.surrogate).expand(c.logps.shape)
    return (without if c.s.beta == 0.0 else without + c.s.beta * c.kl) * c.ratio


def _sapo(c: Work, positive: float, negative: float) -> torch.Tensor:
    tau = torch.where(c.advantages > 0, positive, negative)
    return -(tau * (c.weight - 1)).sigmoid() * 4 / tau * c.advantages


def _total(c: Work) -> torch.Tensor:
    total = (c.log_ratio.detach().clamp(-20, 20) * c.mask).sum(1, keepdim=True)
    rho = c.x.importance_sampling_ratio
    return total if rho is None else total + rho.clamp(min=1e-8).log().clamp(max=20).sum(1, keepdim=True)


def _attached(c: Work) -> torch.Tensor:
    """`log_w` with the gradient of its log-ratios."""
    total = right.log_w(c)
    return total + ((c.log_ratio - c.log_ratio.detach()) * c.mask).sum(1, keepdim=True)


def _over(c: Work) -> Work:
    """With ratios larger by one or two spacings of float32."""
    return Work(**vars(c) | {"weight": c.weight.detach() * (1 + 2**-22)})


def _threshold(c: Work) -> torch.Tensor:
    """The entropy that the entropy mask asks for; that of no token without tokens."""
    entropies = c.entropy.detach()[c.mask.bool()]
    quantile = 1 - float(c.x.top_entropy_quantile)
    return torch.quantile(entropies, quantile) if len(entropies) else c.entropy.new_tensor(torch.inf)


def _on_policy(c: Work, by_token: bool = False, hair: float = 0.0) -> torch.Tensor:
    """The off-policy mask, of tokens, or for drifts below its threshold by a hair."""
    if c.s.off_policy_mask_threshold is None:
        return right.on_policy(c)
    sampled = c.x.old_logps if c.x.sampling_logps is None else c.x.sampling_logps
    gap = torch.zeros_like(c.mask) if sampled is None else torch.nan_to_num(sampled - c.logps.detach(), nan=0.0)
    drift = gap if by_token else (gap * c.mask).sum(1, keepdim=True) / c.lengths
    return ((c.advantages >= 0) | (drift <= c.s.off_policy_mask_threshold - hair)).float()


def _nan_drift(c: Work) -> torch.Tensor:
    if c.s.off_policy_mask_threshold is None or c.x.sampling_logps is None:
        return right.on_policy(c)
    drift = ((c.x.sampling_logps - c.logps.detach()) * c.mask).sum(1, keepdim=True) / c.lengths
    return ((c.advantages >= 0) | (drift <= c.s.off_policy_mask_threshold)).float()


def _mutants() -> Wrong:
    found = around(loss_of(), *READ)
    for name, mistake, read in scaled_gradients("hidden", "weight", "bias", "lora_a lora_b"):
        found[name] = (mistake, loss_of(Steps(read=read).head))
    head, metrics = defaults(Steps), {"kl_metric": "kl", "entropy_metric": "entropy", "clip_ratio": "clip_ratio"}
    controls = head | ORDER | {step: METRICS[name] for step, name in metrics.items()}
    for name, mistake, steps in exchanged("policy", controls, globals()):
        of_head = {step: steps.pop(step) for step in [*steps] if step in head}
        told = {metrics[step]: steps.pop(step) for step in [*steps] if step in metrics}
        found[name] = (mistake, loss_of(Steps(**of_head).head, told, **steps))
    return found


EDITED = Edited(
    {"steps": loss_of(metrics=METRICS)},
    _mutants(),
    ("plain", "autocast"),
    {"kl": "kl-metric", "entropy": "entropy-metric", "clip_ratio": "clip-metric"},
)
