"""Inputs of family `policy`: the tensors of a case.

Clipping, caps and thresholds are constructed, not hoped for: old, reference and sampling log-probs are the oracle's own
minus a target that keeps every log-ratio at least a margin away from each threshold, the margin being the error that
rounding alone may cause. Where no target keeps the margin the token is masked out for all implementations and counted. The
same holds of the tensors of a batch that is stored: one of a real training step.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch

from parity import recording
from parity.case.case import Case, rounded
from parity.case.family import Family
from parity.case.inputs import Inputs, product_dtype
from parity.case.layouts import arranged
from parity.errors import UsageError
from parity.families import head, stored_tensors
from parity.families.policy_losses import epsilon_high, mean
from parity.families.policy_settings import MASKS
from parity.judge.recipe import UNIT_ROUNDOFF
from parity.judge.values import integers, normal, uniform

REQUIRED = (*head.REQUIRED, "mask", "advantages")
BY_TOKEN = "mask completion_mask tool_mask old_logps ref_logps sampling_logps previous_ids".split()
STORED = stored_tensors.HEAD | dict.fromkeys(BY_TOKEN, "BT")
STORED |= {"advantages": "B|BT", "importance_sampling_ratio": "BT|B1", "lora_a": "RH", "lora_b": "VR"}
STORED |= {"num_items_in_batch": "", "top_entropy_quantile": ""}
_MASKS = {dtype: name for name, dtype in MASKS.items()}


def build(family: Family, case: Case) -> Inputs:
    """The inputs of a case, on the CPU.

    Tensors besides those of `head.build`: mask (B, T), completion_mask and tool_mask whose product it is, advantages
    (B,) or (B, T), old_logps, ref_logps, sampling_logps (B, T) or None, importance_sampling_ratio (B, T), (B, 1) or
    None, num_items_in_batch (0-dim), top_entropy_quantile (0-dim or None), previous_ids (B, T), lora_a (r, H) and
    lora_b (V, r) or None. Raises UsageError for settings outside their range.
    """
    s = family.full_settings(case)
    head.check(s, case)
    if s.recording != "none":
        recording.named(s.recording)
    if s.loss_type == "cispo" and s.epsilon_high == 0:
        raise UsageError(f"case {case.id}: epsilon_high=0 must be positive for cispo")
    if case.tensors:
        return _stored(family, case, s)
    tensors = head.build(case, s)
    tensors |= _masks(case, s)
    tensors["previous_ids"] = integers(case.seed, "previous", (s.B, s.T), s.V)
    tensors["lora_a"] = tensors["lora_b"] = None
    if s.head == "lora":
        dtype, rank = tensors["weight"].dtype, s.lora_rank
        tensors["lora_a"] = (normal(case.seed, "lora_a", (rank, s.H)) / s.H**0.5).to(dtype)
        tensors["lora_b"] = (normal(case.seed, "lora_b", (s.V, rank)) * s.peak / (2 * rank) ** 0.5).to(dtype)
    tensors["advantages"] = _advantages(case, s)
    g = head.cotangent(case, s, "loss", ())
    upstream = {"loss": torch.where(g == 0, 0.5, g) if s.cotangent == "random" else g}
    inputs = head.inputs(case, s, tensors, head.leaves(s), upstream)
    return arranged(_with_logps(case, s, inputs))


def _masks(case: Case, s: SimpleNamespace) -> dict[str, Any]:
    lengths = [s.T] * s.B if s.lengths is None else s.lengths
    if len(lengths) != s.B or any(not 0 <= n <= s.T for n in lengths):
        raise UsageError(f"case {case.id}: lengths={s.lengths} must hold B={s.B} integers from 0 to T={s.T}")
    completion = (torch.arange(s.T) < torch.tensor(lengths)[:, None]).long()
    tool = None
    if s.holes:
        tool = (uniform(case.seed, "holes", (s.B, s.T)) < 0.7).long()
    return {"completion_mask": completion, "tool_mask": tool, "mask": completion if tool is None else completion * tool}


def _advantages(case: Case, s: SimpleNamespace) -> torch.Tensor:
    a = normal(case.seed, "advantages", (s.B, s.T) if s.advantages == "token" else (s.B,))
    if s.advantages == "fine":
        return a.float()
    a = a.to(torch.bfloat16).float()
    if s.advantages in ("positive", "negative"):
        return a.abs() * (1 if s.advantages == "positive" else -1)
    if s.advantages == "zero":
        return torch.where(torch.arange(s.B) % 2 == 0, 0.0, a)
    if s.advantages == "zeros":
        return torch.zeros_like(a)
    if s.advantages == "equal":
        return torch.full_like(a, 0.75)
    if s.advantages == "repeated":
        return a.unsqueeze(-1).repeat(1, s.T)
    return a


def _with_logps(case: Case, s: SimpleNamespace, x: Inputs) -> Inputs:
    """Add what derives from the oracle's own log-probs, computed here in float64 and rounded to 2⁻¹⁰."""
    exact, z, all_logps, lp = exactly(x)
    entropy = head.entropy(exact, z, all_logps)
    margin = error_bound(case, s, exact)
    mask = x.mask.bool()
    tensors: dict[str, Any] = dict.fromkeys(("old_logps", "ref_logps", "sampling_logps"))
    undecided = torch.zeros_like(mask)
    if s.old != "absent":
        target, undecided = target_log_ratios(case, s, mask, margin)
        tensors["old_logps"] = rounded(lp - target)
    mask = mask & ~undecided
    if s.beta != 0.0 or s.ref == "unused":
        apart = {"near": 0.0, "close": 0.007, "apart": 0.5, "far": 4.0, "unused": 0.0}[s.ref]
        tensors["ref_logps"] = rounded(lp + apart * normal(case.seed, "ref", lp.shape))
    wanted, old = s.off_policy_mask_threshold is not None or s.sampler in ("given", "nan"), tensors["old_logps"]
    if wanted and s.sampler == "old":  # where the old ones decide, or there are none
        wanted = old is not None and bool((_near_the_threshold(s, lp, old, mask, margin) & mask).any())
    if wanted:
        tensors["sampling_logps"], drop = _sampling(case, s, lp, mask, margin)
        mask = mask & ~drop
    tensors["top_entropy_quantile"] = None
    if s.entropy_quantile:
        tensors["top_entropy_quantile"] = _quantile(case, entropy, mask, margin)
    tensors["importance_sampling_ratio"] = _ratio(case, s, mask)
    dropped = x.mask.bool() & ~mask
    completion = (x.completion_mask.bool() & ~dropped).long()
    kept = completion if x.tool_mask is None else completion * x.tool_mask
    tensors["completion_mask"] = completion
    tensors["mask"] = kept.to(MASKS[s.mask_dtype])
    # At padding stand, as TRL since 1.15 has them, the likeliest token and log-probs of 0. Implementations that score the
    # padding see a log-prob near 0 there, those that do not put 0, and both find a finite ratio.
    padding = ~completion.bool()
    tensors["ids"] = torch.where(padding, z.argmax(-1).view(s.B, s.T), x.ids).to(x.ids.dtype)
    for name in ("old_logps", "ref_logps", "sampling_logps"):
        if tensors[name] is not None:
            tensors[name] = torch.where(padding, 0.0, tensors[name]).float()
    tensors["num_items_in_batch"] = torch.tensor(int(kept.sum()) + s.other_tokens)
    out = x.replace(**tensors)
    return dataclasses.replace(out, undecided=int(dropped.sum()))


def exactly(x: Inputs) -> tuple[Inputs, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The inputs in float64, their logits (B·T, V), all log-probs and those of the ids (B, T)."""
    exact = x.replace(**{k: v.double() for k, v in x.tensors.items() if v is not None and v.is_floating_point()})
    z = head.logits(exact)
    all_logps = torch.log_softmax(z, -1)
    return exact, z, all_logps, head.selected(exact, all_logps)


def error_bound(case: Case, s: SimpleNamespace, exact: Inputs) -> torch.Tensor:
    """How far rounding may move a log-prob, (B, T): logits stored in the dtype of the case, then float32 arithmetic."""
    hidden = exact.hidden.flatten(0, 1).abs()
    if s.head == "tied":
        hidden = hidden + exact.weight[exact.previous_ids.flatten()].abs()
    weight = exact.weight.abs()
    if s.head == "lora":
        weight = weight + (exact.lora_b.abs() @ exact.lora_a.abs())
    size = (hidden @ weight.T).amax(-1)
    if exact.bias is not None:
        size = size + exact.bias.masked_fill(exact.bias.isinf(), 0.0).abs().amax()
    narrow = UNIT_ROUNDOFF[product_dtype(case, s)]
    u = 4 * narrow + 64 * UNIT_ROUNDOFF["fp32"]
    return (u * size * s.logit_scale / s.temperature).view(s.B, s.T) + 2.0**-9


def thresholds(s: SimpleNamespace) -> list[float]:
    """The log-ratios at which the loss changes its formula, ascending."""
    high = epsilon_high(s)
    if s.loss_type == "cispo":
        return [math.log(high)]
    if s.loss_type in ("sapo", "vespo"):
        return []
    return sorted([math.log(1 - s.epsilon), math.log(1 + high)] + ([math.log(s.delta)] if s.delta is not None else []))


def target_log_ratios(
    case: Case, s: SimpleNamespace, mask: torch.Tensor, margin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-ratios (B, T) that keep `margin` from every threshold, and the tokens for which none can."""
    sequence = s.importance_sampling_level == "sequence"
    shape = (s.B, 1) if sequence else (s.B, s.T)
    margin = margin.amax(-1, keepdim=True) if sequence else margin
    reach = 25.0 if s.old == "extreme" else 1.5
    cuts = [-math.inf, *thresholds(s), math.inf]
    regions = list(itertools.pairwise(cuts))
    inside = [i for i, (low, high) in enumerate(regions) if low < 0 < high or low == 0]
    count = len(regions)
    choice = integers(case.seed, "region", shape, count)
    if s.old == "inside":
        choice = torch.full(shape, inside[0] if inside else 0)
    u = uniform(case.seed, "log-ratio", shape)
    target = torch.zeros(shape, dtype=torch.float64)
    done = torch.zeros(shape, dtype=torch.bool)
    for offset in range(count):  # the chosen region, else the next one that leaves room for the margin
        for i, (low, high) in enumerate(regions):
            lower, upper = low + margin, high - margin
            if low == -math.inf:
                lower = upper - reach if high < math.inf else torch.full(shape, -reach, dtype=torch.float64) - margin
            if high == math.inf:
                upper = lower + (reach if low > -math.inf else 2 * reach)
            fits = (upper >= lower) & ((choice + offset) % count == i) & ~done & (lower.abs() < 60) & (upper.abs() < 60)
            target = torch.where(fits, lower + u * (upper - lower), target)
            done |= fits
    undecided = ~done.expand(s.B, s.T) & mask
    if not sequence:
        return target, undecided
    spread = normal(case.seed, "spread", (s.B, s.T)) * min(1.0, reach / 4) * mask
    return target + spread - mean(spread, mask), undecided


def _near_the_threshold(
    s: SimpleNamespace, lp: torch.Tensor, sampling: torch.Tensor, mask: torch.Tensor, margin: torch.Tensor
) -> torch.Tensor:
    """(B, 1) bool: the sequences of which rounding alone decides whether the off-policy mask drops them."""
    gap = mean((sampling - lp).nan_to_num(nan=0.0), mask)
    return (gap - s.off_policy_mask_threshold).abs() <= margin.amax(-1, keepdim=True)


def _sampling(
    case: Case, s: SimpleNamespace, lp: torch.Tensor, mask: torch.Tensor, margin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sampling log-probs whose sequence mean of (lp_samp - lp) keeps away from the threshold, and sequences that cannot."""
    threshold = s.off_policy_mask_threshold or 0.0
    room = margin.amax(-1, keepdim=True)
    above = integers(case.seed, "off-policy", (s.B, 1), 2).bool()
    offset = threshold + torch.where(above, 1, -1) * (room + uniform(case.seed, "gap", (s.B, 1)))
    scored = mask
    if s.sampler == "nan":
        scored = mask & (uniform(case.seed, "unscorable", (s.B, s.T)) >= 0.2)
        scored = torch.where(scored.any(-1, keepdim=True), scored, mask)
    count, total = scored.sum(-1, keepdim=True).clamp(min=1), mask.sum(-1, keepdim=True)
    # a mean below is so near, where there is room, that the mean of the scored tokens alone is above
    near = threshold * (1 - count / total.clamp(min=1)) - 2 * room
    offset = torch.where(above | (near <= 0), offset, threshold - room - near * uniform(case.seed, "gap", (s.B, 1)))
    # tokens differ, on both sides of the threshold; one that could not be scored counts as 0, so the others carry its share
    d = -recorded_log_ratios(case, s) if s.recording != "none" else normal(case.seed, "gaps", lp.shape)
    samp = lp + offset * total / count + d - (d * scored).sum(-1, keepdim=True) / count
    samp = torch.where(mask & ~scored, torch.nan, rounded(samp))
    return samp, torch.zeros_like(mask) if s.sampler == "nan" else (room > 40).expand_as(mask) & mask


def _quantile(case: Case, entropy: torch.Tensor, mask: torch.Tensor, margin: torch.Tensor) -> torch.Tensor | None:
    """`top_entropy_quantile` whose threshold lies between two entropies that rounding cannot exchange, or is one; or None.

    The threshold is midway between neighbours k and k + 1 of the sorted entropies and moves by half the sum of their
    errors. An entropy moves by less than four times the bound of its log-probs. In some cases it is the k-th entropy
    itself, if k/(n - 1) has no rounding: that token is kept, whatever its value. Preferred are quantiles that would keep
    other tokens if padding counted among the entropies, then those of the kind drawn, then those that leave most room.
    """
    values, order = entropy[mask].sort()
    error, n = 4 * margin[mask][order], len(values)
    between: list[tuple[float, torch.Tensor]] = []  # (place, how far each entropy is from deciding otherwise)
    for k in range(0, n - 1, 1 + n * n // QUANTILES):
        away = (values - (values[k] + values[k + 1]) / 2).abs() - error
        between.append((k + 0.5, away.amin() - (error[k] + error[k + 1]) / 2))
        if 16 * (k + 1) % (n - 1) == 0:
            away = (values - values[k + 1]).abs() - error - error[k + 1]
            between.append((k + 1.0, away[torch.arange(n) != k + 1].amin()))
    one = bool(uniform(case.seed, "quantile", ()) < 0.4)
    best, found = (False, False, 0.0), None
    for place, room in between:
        kept = values >= values[math.ceil(place)]
        shifted = bool(((values >= torch.quantile(entropy.flatten(), place / (n - 1))) != kept).any())
        if room > 0 and (shifted, (place % 1 == 0) == one, float(room)) > best:
            best, found = (shifted, (place % 1 == 0) == one, float(room)), place / (n - 1)
    return None if found is None else torch.tensor(1 - found, dtype=torch.float64)


QUANTILES = 1 << 18
"""Entropies looked at for a quantile, about: of more than 512 tokens not every place between two is tried."""
CLIP_MAX = 3.0
"""TRL's default of `vllm_importance_sampling_clip_max`."""


def recorded_log_ratios(case: Case, s: SimpleNamespace) -> torch.Tensor:
    """log π - log π_sampler (B, T) of consecutive tokens of a recording, from a row by the seed on.

    π is the trainer's over the whole vocabulary, as TRL has it: with top-p the ratios have the kept mass for their mean.
    """
    taken = recording.named(s.recording)
    if taken.trainer_logps is None:
        raise UsageError(f"case {case.id}: recording {s.recording!r} has no trainer's log-probs")
    d = (taken.trainer_logps.double() - taken.sampler_logps.double())[taken.mask]
    start = int(integers(case.seed, "recorded", (1,), len(d)))
    at = (start + torch.arange(s.B * s.T)) % len(d)
    return d[at].nan_to_num(nan=0.0).view(s.B, s.T)


def _ratio(case: Case, s: SimpleNamespace, mask: torch.Tensor) -> torch.Tensor | None:
    if s.ratio == "none":
        return None
    if s.recording != "none":
        d = torch.where(mask, recorded_log_ratios(case, s), 0.0)
        d = d if s.ratio == "token" else d.sum(-1, keepdim=True)
        return d.exp().clamp(max=CLIP_MAX).float()
    shape = (s.B, s.T) if s.ratio == "token" else (s.B, 1)
    u = uniform(case.seed, "ratio", shape)
    rho = 0.5 + 1.5 * u if s.ratio_range == "unit" else 10.0 ** (-3 + 5 * u)
    if s.ratio_range == "zeros":
        rho = torch.where(uniform(case.seed, "zero", shape) < 0.3, 0.0, rho)
    return (torch.where(mask, rho, 1.0) if s.ratio == "token" else rho).float()


def completed(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors with both masks: a completion ends at the last token of its mask, what is missing before is a tool's."""
    out = dict(tensors)
    mask = out["mask"].bool()
    if "completion_mask" not in out:
        out["completion_mask"] = mask.flip(-1).long().cumsum(-1).flip(-1).clamp(max=1)
        if bool((out["completion_mask"].bool() != mask).any()):
            out["tool_mask"] = mask.long()
    out.setdefault("num_items_in_batch", mask.sum())
    return out


def derived(family: Family, tensors: Mapping[str, torch.Tensor], where: str) -> dict[str, Any]:
    """The settings that the tensors decide. Raises UsageError for masks that contradict one another."""
    out = stored_tensors.of_head(family, tensors, where, REQUIRED)
    mask, completion, tool = (tensors.get(n) for n in ("mask", "completion_mask", "tool_mask"))
    if mask is None or completion is None or "num_items_in_batch" not in tensors:
        raise UsageError(f"{where}: mask, completion_mask or num_items_in_batch is missing")
    product = completion.bool() if tool is None else completion.bool() & tool.bool()
    lengths = completion.long().sum(-1)
    ends = torch.arange(completion.shape[1]) < lengths[:, None]
    if bool((product != mask.bool()).any()) or bool((ends != completion.bool()).any()) or mask.dtype not in _MASKS:
        raise UsageError(f"{where}: mask is not completion_mask (a number of tokens from the first on) times tool_mask")
    ratio = tensors.get("importance_sampling_ratio")
    token = ratio is not None and ratio.shape == mask.shape
    return out | {
        "lengths": None if bool(ends.all()) else lengths.tolist(),
        "holes": tool is not None,
        "mask_dtype": _MASKS[mask.dtype],
        "advantages": "token" if tensors["advantages"].dim() == 2 else "mixed",
        "old": "mixed" if "old_logps" in tensors else "absent",
        "ratio": "none" if ratio is None else "token" if token else "sequence",
        "sampler": "given" if "sampling_logps" in tensors else "none",
        "entropy_quantile": "top_entropy_quantile" in tensors,
        "head": "lora" if "lora_a" in tensors else "tied" if "previous_ids" in tensors else "plain",
    }


def _stored(family: Family, case: Case, s: SimpleNamespace) -> Inputs:
    """The inputs of a stored batch. A token (a sequence, where the ratio is a sequence's) for which rounding alone
    decides on which side of a threshold it falls is masked out and counted, see `Inputs.undecided`. Raises UsageError
    where nothing decided is left."""
    x = stored_tensors.inputs(family, case, scalar=True)
    if s.beta != 0.0 and x.ref_logps is None:
        raise UsageError(f"{case.tensors}: beta={s.beta} needs ref_logps")
    open_ = _undecided(case, s, x) & x.mask.bool()
    count = int(open_.sum())
    if count and count == int(x.mask.bool().sum()) and not case.seed:
        raise UsageError(f"{case.tensors}: rounding alone decides on which side of a threshold each token falls")
    if not count:
        return x
    keep = {"mask": (x.mask.bool() & ~open_).to(x.mask.dtype)}
    name = "completion_mask" if x.tool_mask is None else "tool_mask"
    keep[name] = (x.tensors[name].bool() & ~open_).to(x.tensors[name].dtype)  # type: ignore[union-attr]
    return dataclasses.replace(x.replace(**keep), undecided=count)


def _undecided(case: Case, s: SimpleNamespace, x: Inputs) -> torch.Tensor:
    """(B, T) bool: a threshold lies within what rounding may move."""
    exact, z, all_logps, lp = exactly(x)
    margin, mask = error_bound(case, s, exact), x.mask.bool()
    out = torch.zeros_like(mask)
    if x.old_logps is not None:
        d = torch.where(mask, lp - exact.old_logps, 0.0)
        sequence = s.importance_sampling_level == "sequence"
        value, room = (mean(d, mask), margin.amax(-1, keepdim=True)) if sequence else (d, margin)
        for cut in thresholds(s):
            out |= (value - cut).abs() < room
    sampling = exact.sampling_logps if x.sampling_logps is not None else exact.old_logps
    if s.off_policy_mask_threshold is not None and sampling is not None:
        out |= _near_the_threshold(s, lp, sampling, mask, margin)
    if x.top_entropy_quantile is not None and bool(mask.any()):
        entropy = head.entropy(exact, z, all_logps)
        cut = torch.quantile(entropy[mask], 1 - float(x.top_entropy_quantile))
        if bool(((entropy - cut).abs() < 4 * margin)[mask].any()):  # to drop a token would move the quantile itself
            raise UsageError(f"{case.tensors}: rounding alone decides which tokens the entropy quantile keeps")
    return out
