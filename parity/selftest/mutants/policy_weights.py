"""Mutants of family `policy` in how tokens are weighed: normalisers, masks, the sampler's ratio, special batches."""

import torch

from parity.selftest.controls import policy as right
from parity.selftest.controls.policy import Step, Work
from parity.selftest.mutants.steps import Edit, Mutants, recorder

MUTANTS: Mutants = {}
_wrong = recorder(MUTANTS)


def _divided(*loss_types: str, by: Step) -> Step:
    """The divisor of some loss types exchanged."""
    return lambda c: by(c) if c.s.loss_type in loss_types else right.divisor(c)


WINDOWED = ("dapo", "cispo", "vespo")

_wrong(
    "length-plus-one",
    "grpo: |o| + 1",
    divisor=_divided("grpo", "sapo", by=lambda c: (c.lengths + 1) * len(c.mask) * c.steps),
)
_wrong(
    "length-minus-one",
    "grpo: |o| - 1",
    divisor=_divided("grpo", "sapo", by=lambda c: (c.lengths - 1).clamp(min=1) * len(c.mask) * c.steps),
)
_wrong("tokens-plus-one", "bnpo: Σ m + 1", divisor=_divided("bnpo", by=lambda c: (c.mask.sum() + 1) * c.steps))
_wrong("items-plus-one", "dapo: N + 1", items=lambda c: right.items(c) + 1)
_wrong("items-minus-one", "dapo: N - 1", items=lambda c: (right.items(c) - 1).clamp(min=1.0))
_wrong("rows-plus-one", "luspo: B + 1 sequences", divisor=_divided("luspo", by=lambda c: (len(c.mask) + 1) * c.steps))
_wrong(
    "maximum-is-width",
    "dr_grpo: width of this batch for the maximal completion length",
    divisor=_divided("dr_grpo", by=lambda c: float(c.mask.numel()) * c.steps),
)
_wrong(
    "micro-batch-for-batch",
    "tokens of this micro-batch for those of the batch",
    divisor=_divided(*WINDOWED, by=lambda c: c.mask.sum().clamp(min=1.0)),
)
_wrong(
    "rank-for-global",
    "tokens of this rank, times the accumulation steps, for those of all ranks",
    items=lambda c: c.mask.sum().clamp(min=1.0) * c.steps,
)
_wrong(
    "tokens-before-masking",
    "N counts tokens before the tool mask",
    items=lambda c: c.x.num_items_in_batch.float() + (c.x.completion_mask.sum() - c.mask.sum()),
)
_wrong(
    "lengths-before-masking",
    "|o| counts tokens before the tool mask",
    lengths=lambda c: c.x.completion_mask.sum(1, keepdim=True).float().clamp(min=1.0),
)
_wrong("lengths-with-padding", "|o| counts padding", lengths=lambda c: torch.full_like(c.mask[:, :1], c.mask.shape[1]))
_wrong("accumulation-forgotten", "accumulation steps forgotten", steps=lambda c: torch.tensor(1.0))
_wrong(
    "accumulation-in-evaluation",
    "divided by the accumulation steps in evaluation",
    steps=lambda c: torch.tensor(float(c.s.accumulation)),
)
_wrong(
    "accumulation-twice",
    "dapo divided by the accumulation steps as well",
    divisor=_divided(*WINDOWED, by=lambda c: right.divisor(c) * c.steps),
)
_wrong("generation-forgotten", "steps per generation forgotten in N", window=lambda c: torch.tensor(1.0))
_wrong(
    "mean-of-means",
    "mean of means for a token mean",
    divisor=_divided("bnpo", by=lambda c: c.lengths * len(c.mask) * c.steps),
)
_wrong(
    "token-mean",
    "token mean for a mean of means",
    divisor=_divided("grpo", "sapo", by=lambda c: c.mask.sum().clamp(min=1.0) * c.steps),
)
_wrong(
    "luspo-by-length",
    "luspo divided by the lengths",
    divisor=_divided("luspo", by=lambda c: c.lengths * len(c.mask) * c.steps),
)
_wrong(
    "empty-rows-left-out",
    "empty rows left out of the mean over sequences",
    divisor=_divided("grpo", "sapo", by=lambda c: c.lengths * (c.mask.sum(1) > 0).sum().clamp(min=1) * c.steps),
)

_wrong("mask-ignored", "mask ignored", mask=lambda c: torch.ones_like(c.logps))
_wrong("mask-inverted", "mask inverted", mask=lambda c: 1 - right.mask(c))
_wrong("tool-mask-dropped", "tool mask dropped", mask=lambda c: c.x.completion_mask.float())
_wrong(
    "mask-twice",
    "mask applied twice: row means masked and averaged over tokens once more",
    policy_loss=lambda c: right.policy_loss(c) if c.s.loss_type != "grpo" else _twice(c),
)
_wrong("mask-shifted", "shift by one: mask of the next position", mask=lambda c: right.mask(c).roll(-1, 1))
_wrong(
    "old-shifted",
    "shift by one: old log-probs of the next position",
    log_ratio=lambda c: c.logps - (c.logps.detach() if c.x.old_logps is None else c.x.old_logps.roll(1, 1)),
)
_wrong(
    "last-dropped",
    "last token dropped",
    mask=lambda c: right.mask(c).index_fill(1, torch.tensor([c.x.mask.shape[1] - 1], device=c.x.device), 0.0),
)
_wrong(
    "last-row-dropped",
    "last sequence dropped",
    mask=lambda c: right.mask(c).index_fill(0, torch.tensor([len(c.x.mask) - 1], device=c.x.device), 0.0),
)


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


_wrong("ratio-dropped", "importance ratio dropped", ratio=lambda c: torch.ones_like(c.mask))
_wrong("ratio-after-kl", "importance ratio applied after the KL", token=_after_kl)
_wrong("ratio-capped", "importance ratio capped at 1", ratio=lambda c: _rho(c, lambda r: r.clamp(max=1.0)))
_wrong(
    "ratio-capped-high", "importance ratio capped at 3 once more", ratio=lambda c: _rho(c, lambda r: r.clamp(max=3.0))
)
_wrong("ratio-as-log", "importance ratio read as its logarithm", ratio=lambda c: _rho(c, torch.exp))
_wrong(
    "ratio-zero",
    "wrong only for a zero ratio: taken for a missing one",
    ratio=lambda c: _rho(c, lambda r: torch.where(r == 0, 1.0, r)),
)
_wrong(
    "ratio-renormalised",
    "importance ratios normalised to mean 1",
    ratio=lambda c: _rho(c, lambda r: r / r.mean().clamp(min=1e-6)),
)
_wrong(
    "ratio-in-vespo",
    "vespo: ratio multiplied in besides",
    ratio=lambda c: torch.ones_like(c.mask) if c.x.importance_sampling_ratio is None else c.x.importance_sampling_ratio,
)
_wrong(
    "ratio-not-in-vespo",
    "vespo: ratio not folded into W",
    log_w=lambda c: (c.log_ratio.detach().clamp(-20, 20) * c.mask).sum(1, keepdim=True).clamp(-18.420680743952367, 20),
)


def _special(name: str, mistake: str, applies: Step, change: Step) -> None:
    """A loss that is wrong only where `applies`."""
    _wrong(name, mistake, policy_loss=lambda c: change(c) if bool(applies(c)) else right.policy_loss(c))


def _uneven(c: Work) -> torch.Tensor:
    return torch.as_tensor(len(c.advantages) > 1 and bool((c.advantages == c.advantages[:1]).all()))


_special(
    "batch-of-one",
    "wrong only for batch 1: its mean taken over positions",
    lambda c: torch.as_tensor(len(c.mask) == 1),
    lambda c: right.policy_loss(c) * c.lengths.squeeze() / c.mask.shape[1],
)
_special(
    "empty-sequence",
    "wrong only for an empty sequence: 0/0",
    lambda c: (c.mask.sum(1) == 0).any(),
    lambda c: right.policy_loss(c) * (c.mask.sum(1) / c.mask.sum(1)).mean(),
)
_special(
    "all-masked",
    "wrong only for a batch that is masked altogether: NaN",
    lambda c: c.mask.sum() == 0,
    lambda c: right.policy_loss(c) / c.mask.sum(),
)
_special(
    "equal-advantages",
    "wrong only for equal advantages: taken for no signal",
    _uneven,
    lambda c: right.policy_loss(c) * 0,
)
_special(
    "one-position",
    "wrong only for T = 1: squeezed away",
    lambda c: torch.as_tensor(c.mask.shape[1] == 1),
    lambda c: right.policy_loss(c) * len(c.mask),
)
_wrong(
    "zero-advantages",
    "tokens of zero advantage left out, KL included",
    mask=lambda c: right.mask(c) * (right.advantages(c) != 0),
)
_wrong(
    "advantages-per-sequence",
    "per-token advantages: the first of each sequence for all",
    advantages=lambda c: right.advantages(c)[:, :1],
)
_wrong(
    "advantages-whitened",
    "advantages divided by their standard deviation",
    advantages=lambda c: right.advantages(c) / (c.x.advantages.std(correction=0) + 1e-4),
)
